"""Models of transformers, also in the wrappers of PEFT, in parts.

A model's loss is a mean over some of its labels. A dry run with chosen labels shows which ones. All logits are zeros in
it, so each label that counts adds a gradient of the same size. The first row has more such labels than the others, and
its share of the gradient says which labels count. With `v` for a label, `p` for padding and `.` for an ignored label:

    first row    v v v p p .     of two rows its share is 5/7, and 3/5 if `p` is ignored, too;
    second row   v v . . . .     4/5 and 2/3 if the label at the first position is compared with nothing;
                                 1/2 if all rows count alike, or all labels do
"""

from __future__ import annotations

import functools
import inspect
import math
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor, nn
from transformers.configuration_utils import PreTrainedConfig
from transformers.modeling_utils import PreTrainedModel
from transformers.utils import output_capturing

from pipework import torch_private
from pipework.integrations.splits import FAMILIES, ImagesOfRows, PackedSequences, split_for
from pipework.model.marks import MicroBatches, has_micro_batches
from pipework.model.parts.adapter import Adapter, SideOutputs
from pipework.model.parts.leaves import flatten, held_by, unflatten
from pipework.model.parts.outputs import joined
from pipework.model.parts.side_effects import put_back
from pipework.signatures import signature_of

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

_HAS_HOOKS = "_output_capturing_hooks_installed"
_ITEMS = "num_items_in_batch"
_FORM = "return_dict"
_CACHES = ("past_key_values", "cache")  # until transformers 5.23, and since
_ROUTERS = "output_router_logits"
_USUAL: Final = -100  # in labels, where a model counts nothing
_CLOSE: Final = 1e-3  # the shares above differ by more


class TransformersAdapter(Adapter):
    """What is special about models of transformers.

    Args:
        model: without wrappers.
    """

    masks = ("attention_mask",)

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        # Kept, since each micro-batch asks them, and a large model has hundreds of other modules.
        self._recomputing = [module for module in model.modules() if hasattr(module, "gradient_checkpointing")]
        self._caches = hasattr(model.config.get_text_config(), "use_cache") and _takes_use_cache(type(model).forward)
        self.side_outputs = CapturedOutputs()
        self._target: str | None = None
        self._hides_labels = False
        self._weight: Callable[[Any], Any] = len
        self._split: ImagesOfRows | PackedSequences | None = None
        self._unseen: Collection[str] = ()

    def blocks(self, model: nn.Module) -> set[str] | None:
        """The classes that transformers does not split; None: those of this model are not named."""
        names = set().union(*(getattr(module, "_no_split_modules", None) or () for module in model.modules()))
        there = {type(module).__name__ for module in model.modules()}
        return names & there or None

    def shared(self, model: nn.Module) -> Iterator[object]:
        """The configurations."""
        for module in model.modules():
            yield from (value for value in vars(module).values() if isinstance(value, PreTrainedConfig))

    def stand_in(self, stand_in: nn.Module, unit: nn.Module) -> nn.Module:
        """With the hooks by which transformers collects hidden states."""
        for hook in torch_private.forward_hooks(unit).values():
            if isinstance(hook, CapturingHook):
                stand_in.register_forward_hook(hook)
        return stand_in

    def owns_hooks(self, module: nn.Module) -> bool:
        """They collect what the forward around them returns, and it starts anew in every part."""
        return all(isinstance(hook, CapturingHook) for hook in torch_private.all_hooks(module))

    def prepare(self, model: nn.Module) -> None:
        """Installs these hooks, which each copy would install again, as objects that can be pickled.

        Raises:
            ValueError: the model recomputes its layers itself.
        """
        self._refuse_recomputation()
        models = [module for module in model.modules() if isinstance(module, PreTrainedModel)]
        for one in models:
            # In models inside that have hooks, as backbones have them, transformers would install all hooks again.
            with put_back([each for each in models if vars(each).get(_HAS_HOOKS)], values=False):
                output_capturing.maybe_install_capturing_hooks(one)
        for module in model.modules():
            hooks = torch_private.forward_hooks(module)
            own = {number: hook for number, hook in hooks.items() if hook.__module__ == output_capturing.__name__}
            hooks.update((number, CapturingHook.of(hook)) for number, hook in own.items())

    def _refuse_recomputation(self) -> None:
        if any(module.gradient_checkpointing for module in self._recomputing):
            raise ValueError(
                f"this {type(self._model).__name__} recomputes its layers itself, which is the task of the pipe: call "
                "gradient_checkpointing_disable(), and choose attach(..., checkpoint='always') or 'except_last'"
            )

    def split(self, sample: dict[str, Any], target: str) -> ImagesOfRows | PackedSequences | None:
        """By the images of each row, or between sequences that are packed into one row."""
        media = {each.values for each in FAMILIES.get(self._model.config.model_type, ())}
        self._unseen = media if media.isdisjoint(name for name, value in sample.items() if value is not None) else ()
        self._split = split_for(self._model.config, sample, target)
        return self._split

    def inputs(self, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Without a cache, which would be a state of every part.

        Raises:
            ValueError: the model recomputes its layers itself.
        """
        self._refuse_recomputation()
        return arguments, {**({"use_cache": False} if self._caches else {}), **keywords}

    def weighs(self, target: str, weight: Callable[[Any], Any] | None) -> None:
        """See `Adapter.weighs`."""
        self._target = target
        self._weight = len if weight is None else weight

    def counted(self, target: str, names: Mapping[str, Any]) -> Any:
        """Without the labels that the model itself leaves out: of what the mask hides."""
        labels, mask = names.get(target), names.get(*self.masks)
        if not self._hides_labels or labels is None or mask is None:
            return labels
        if isinstance(labels, MicroBatches):
            return MicroBatches(each.masked_fill(of == 0, _USUAL) for each, of in zip(labels, mask, strict=True))
        return labels.masked_fill(mask == 0, _USUAL)

    def mini_batch(self, keywords: dict[str, Any]) -> dict[str, Any]:
        """The pipe's own keyword arguments: a result has names in the pipe, whatever form the call asks for.

        The number by which a model divides its summed loss, such as that of all tokens, is there per unit of weight.

        Trainers give this number, for all mini-batches of a step of the optimizer. The pipe takes the weighted mean of
        its micro-batches' losses, so that each micro-batch must divide by its share of the number.
        """
        if (name := next((name for name in self._unseen if keywords.get(name) is not None), None)) is not None:
            raise ValueError(
                f"{type(self._model).__name__} got a batch with {name!r}, and the sample of attach was text alone: the "
                "sample needs images, as it shows which modules run, and how images go with their rows"
            )
        if keywords.get(_FORM) is False:
            keywords = {name: value for name, value in keywords.items() if name != _FORM}
        items, target = keywords.get(_ITEMS), keywords.get(self._target or "")
        if items is None or self._target is None:
            return keywords
        others = {name: value for name, value in keywords.items() if name != _ITEMS}
        if target is None:  # no loss is computed
            return others
        parts = [target] if isinstance(target, Tensor) else target
        total = float(sum(map(self._weight, parts)))
        return {**others, _ITEMS: float(items) / total if total else math.nan}

    def micro_batch(self, keywords: dict[str, Any]) -> dict[str, Any]:
        """With the share of a micro-batch of this number."""
        if self._target is None or keywords.get(_ITEMS) is None:
            return keywords
        return {**keywords, _ITEMS: keywords[_ITEMS] * self._weight(keywords[self._target])}

    def result(self, output: Any) -> Any:
        """Without objects that hold tensors, such as caches, which would be a state of every part."""
        leaves, form = flatten(output)
        return unflatten([None if not isinstance(each, Tensor) and held_by(each) else each for each in leaves], form)

    def form(self, result: Any, keywords: Mapping[str, Any]) -> Any:
        """Joined, if `split` has cut the batch; a tuple if the call asks for one."""
        if self._split is not None and isinstance(result, MicroBatches) and not has_micro_batches((), keywords):
            result = joined(result, self._split.dim)
        return result.to_tuple() if keywords.get(_FORM) is False and hasattr(result, "to_tuple") else result

    def is_generating(self, keywords: Mapping[str, Any]) -> bool:
        """Whether there is a cache."""
        return bool(keywords.get("use_cache")) or any(keywords.get(name) is not None for name in _CACHES)

    def initialiser(self, model: nn.Module, name: str) -> Callable[[], object] | None:
        """What the innermost model of transformers around a module does with it; an adapter of PEFT does it itself."""
        path = [model]
        for each in name.split(".") if name else ():
            path.append(path[-1].get_submodule(each))
        for module in reversed(path[:-1]):
            reset: Any = getattr(module, "reset_lora_parameters", None)
            if reset is not None and path[-1] is not getattr(module, "base_layer", None):
                return functools.partial(reset, name.rpartition(".")[2], init_lora_weights=True)
        owner = next((each for each in reversed(path) if isinstance(each, PreTrainedModel)), None)
        return None if owner is None else functools.partial(owner._init_weights, path[-1])

    def loss_weight(self, target: Any, result: Any, ask: Callable[..., Any]) -> Callable[[Any], Any] | None:
        """The number of labels that the loss of a micro-batch is a mean over.

        Raises:
            ValueError: the loss is a sum over rows, or it cannot be told which labels it counts.
        """
        kind, config = type(self._model).__name__, self._model.config
        if kind.endswith("ForCTC"):
            if getattr(config, "ctc_loss_reduction", None) == "sum":
                raise ValueError(
                    f"the loss of this {kind} is a sum over the rows of a mini-batch, and that of a pipe is the mean "
                    "of its micro-batches' losses: set model.config.ctc_loss_reduction = 'mean', or give loss_weight="
                )
            return len  # each row's loss is divided by its own number of labels
        if not isinstance(target, Tensor) or target.is_floating_point() or target.dtype is torch.bool:
            return None
        self._hides_labels = hides_labels(target, ask)
        if self._hides_labels:  # the mask of the sample would hide some of the labels in question
            ask = functools.partial(ask, attention_mask=torch.ones_like(target))
        return weight_of_labels(kind, target, getattr(result, "logits", None), ask, config) or len

    def comparable(self, keywords: dict[str, Any]) -> dict[str, Any]:
        """Without the losses of routers, for the balance within a micro-batch, and the number of items of a step."""
        config = self._model.config
        routes = any(each.get(_ROUTERS) for each in (keywords, vars(config), vars(config.get_text_config())))
        others = {name: value for name, value in keywords.items() if name != _ITEMS}
        return {**others, _ROUTERS: False} if routes else others


def _takes_use_cache(forward: Callable[..., Any]) -> bool:
    """Whether a forward takes `use_cache`; some pass on keyword arguments, and set this one themselves."""
    parameters = signature_of(forward).parameters
    if "use_cache" in parameters:
        return True
    constants = inspect.unwrap(forward).__code__.co_consts
    sets = any(isinstance(each, tuple) and "use_cache" in each for each in constants)
    return not sets and any(each.kind is each.VAR_KEYWORD for each in parameters.values())


class CapturingHook:
    """A hook by which transformers collects hidden states. It can be pickled, and transformers' own, a closure, cannot.

    Args:
        key: see transformers' `install_output_capuring_hook`.
        index: likewise.
        capture_initial_hidden_state: likewise.
    """

    pipework_in_graph = True  # see `Fingerprint.hooked`

    def __init__(self, key: str, index: int, capture_initial_hidden_state: bool) -> None:
        module = nn.Identity()
        self._arguments = key, index, capture_initial_hidden_state
        output_capturing.install_output_capuring_hook(module, *self._arguments)
        (self._hook,) = torch_private.forward_hooks(module).values()

    @classmethod
    def of(cls, hook: Any) -> CapturingHook:
        """The same as transformers' hook, which has these arguments as its closure."""
        closure = inspect.getclosurevars(hook).nonlocals
        return cls(*map(closure.__getitem__, ("key", "index", "capture_initial_hidden_state")))

    def __call__(self, module: nn.Module, arguments: Any, output: Any) -> None:
        """Appends what the module returns to the lists of the present forward."""
        self._hook(module, arguments, output)

    def __reduce__(self) -> tuple[Any, ...]:
        """Made anew from its arguments."""
        return CapturingHook, self._arguments


class CapturedOutputs(SideOutputs):
    """What transformers' hooks have collected in the present forward, such as router logits."""

    def mark(self) -> dict[str, int]:
        """See `SideOutputs.mark`."""
        return {name: len(items) for name, items in self._lists()}

    def since(self, mark: dict[str, int]) -> dict[str, list[Any]]:
        """See `SideOutputs.since`."""
        return {name: items[mark[name] :] for name, items in self._lists() if len(items) > mark.get(name, 0)}

    def add(self, items: dict[str, list[Any]]) -> None:
        """See `SideOutputs.add`."""
        lists = dict(self._lists())
        for name, each in items.items():
            lists[name].extend(each)

    def remove(self, mark: dict[str, int]) -> None:
        """See `SideOutputs.remove`."""
        for name, items in self._lists():
            del items[mark.get(name, 0) :]

    def _lists(self) -> Iterable[tuple[str, list[Any]]]:
        collected = output_capturing._active_collector.get() or {}  # type: ignore[no-untyped-call]
        return [(name, items) for name, items in collected.items() if isinstance(items, list)]


def weight_of_labels(
    model: str, labels: Tensor, logits: Tensor | None, ask: Callable[[Tensor], Any], config: PreTrainedConfig
) -> Callable[[Tensor], Tensor] | None:
    """A function that counts the labels of a micro-batch over which its loss is a mean; None: all rows count alike.

    Args:
        model: its class, as messages call it.
        labels: of a few rows, integers.
        logits: of the model for them, without values.
        ask: from other labels of these rows to what the model returns in a dry run, with its graph.
        config: of the model.

    Raises:
        ValueError: it cannot be told.
    """
    if labels.dim() < 2:
        return functools.partial(counted_labels, is_shifted=False, ignored=(_USUAL,))
    of_config = [value for name, value in vars(config).items() if "ignore_index" in name and isinstance(value, int)]
    pad = getattr(config.get_text_config(), "pad_token_id", None)
    if logits is None or not isinstance(pad, int) or not 0 <= pad < logits.shape[-1]:
        pad = None
    is_alike, failure = False, None
    for number in dict.fromkeys([*of_config, _USUAL]):
        asked = _question(labels if len(labels) > 1 else torch.cat([labels, labels]), number, pad)
        try:
            share = _share_of_first_row(asked, ask, len(labels))
        except Exception as error:
            failure = error
            continue
        for is_shifted in (False, True):
            for ignored in [(number,)] if pad is None else [(number,), (number, pad)]:
                weight = functools.partial(counted_labels, is_shifted=is_shifted, ignored=ignored)
                if abs(float(weight(asked[:1]) / weight(asked)) - share) < _CLOSE:
                    return weight
        is_alike |= abs(1 / len(asked) - share) < _CLOSE
    if is_alike:
        return None
    raise ValueError(
        f"it cannot be told which of the labels, of shape {tuple(labels.shape)}, the loss of this {model} is a mean "
        "over, and the pipe weighs micro-batches by them: give attach loss_weight=, a function from the labels of a "
        "micro-batch to how many of them count, such as lambda labels: (labels[:, 1:] != -100).sum()"
    ) from failure


def hides_labels(labels: Tensor, ask: Callable[..., Any]) -> bool:
    """Whether a loss itself leaves out labels where the attention mask is 0.

    Args:
        labels: of a few rows, integers.
        ask: from other labels of these rows, and a mask, to what the model returns in a dry run, with its graph.
    """
    known = labels[labels >= 0]
    if labels.dim() != 2 or not len(known):
        return False
    asked, mask = torch.full_like(labels, int(known[0])), torch.ones_like(labels, dtype=torch.long)
    hidden = mask.index_fill(1, mask.new_tensor([mask.shape[1] - 1]), 0)
    try:
        whole, others = (
            torch.count_nonzero(_gradient(asked, functools.partial(ask, attention_mask=each)))
            for each in (mask, hidden)
        )
    except Exception:  # the model takes no such mask, or has no logits
        return False
    return bool(others < whole)


def counted_labels(labels: Tensor, *, is_shifted: bool, ignored: Sequence[int]) -> Tensor:
    """How many labels count.

    Args:
        labels: of a micro-batch.
        is_shifted: whether position i is compared with label i + 1, so that the first label does not count.
        ignored: the labels that do not count.

    Example:
        >>> counted_labels(torch.tensor([[1, 2, -100]]), is_shifted=True, ignored=[-100])
        tensor(1)
    """
    compared = labels[:, 1:] if is_shifted else labels
    return torch.stack([compared != each for each in ignored]).all(0).sum()


def _question(labels: Tensor, ignored: int, pad: int | None) -> Tensor:
    """The labels of the drawing above, as far as they fit into a row."""
    known = labels[(labels >= 0) & (labels != (-1 if pad is None else pad))]
    label = int(known[0]) if len(known) else int(pad == 0)
    asked = torch.full_like(labels, ignored).flatten(1)
    most = min(3, asked.shape[1])
    asked[:, : most - 1] = label
    asked[0, :most] = label
    if pad is not None and asked.shape[1] >= 5:
        asked[0, 3:5] = pad
    return asked.view_as(labels)


def _share_of_first_row(asked: Tensor, ask: Callable[[Tensor], Any], rows: int) -> float:
    """How many of the labels that count are in the first row, as a share from 0 to 1.

    Args:
        asked: labels.
        ask: see above.
        rows: of a mini-batch of `ask`. If it is 1, each row is asked alone: then the gradient of a label that counts
            is 1 / the number of labels that count.

    Raises:
        Exception: it cannot be told: there are no logits of so many rows, or the labels are none of this model.
    """
    if rows == 1:
        first, second = (float(_gradient(row, ask).abs().max()) for row in (asked[:1], asked[1:]))
        return second / (first + second)
    gradient = _gradient(asked, ask).reshape(rows, -1)
    wide = torch.promote_types(gradient.dtype, torch.float32)
    sizes = torch.linalg.vector_norm(gradient, 1, dim=1, dtype=wide)
    return float(sizes[0] / sizes.sum())


def _gradient(asked: Tensor, ask: Callable[[Tensor], Any]) -> Tensor:
    """The gradient of the logits, or of the tensor of which they are a part."""
    result = ask(asked)
    loss, edge = result.loss, torch.autograd.graph.get_gradient_edge(result.logits)
    del result  # its logits are as large as the gradient
    (gradient,) = torch.autograd.grad(loss, [edge], allow_unused=True)
    while gradient is None:  # the loss is of more than these logits
        node, number = edge.node.next_functions[0]
        edge = torch.autograd.graph.GradientEdge(node, number)
        (gradient,) = torch.autograd.grad(loss, [edge], allow_unused=True)
    return gradient
