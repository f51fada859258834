"""A dry run of a model's forward: which units it calls in which order, and to which of them each tensor goes.

Units compute nothing: they return zeros, in the shapes that they return on the meta device. A dispatch mode sees each
operator of the forward, and notes from which inputs, calls and parameters each tensor was computed.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from pipework import torch_private
from pipework.model.parts import run as runs
from pipework.model.parts.leaves import flatten, held_by, mapped, tensors_in
from pipework.model.parts.run import Message, PartRun
from pipework.model.parts.side_effects import (
    KeptState,
    LeftTensors,
    generators_put_back,
    other_tensors,
    put_back,
    random_states_put_back,
)
from pipework.model.parts.trace import END, CannotCut, PartSpan, Source, Trace, call_name, input_name
from pipework.signatures import positional_names as names_of_arguments
from pipework.torch_private import memory_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from pipework.model.parts.leaves import Absent
    from pipework.model.parts.sample import Arguments
    from pipework.model.parts.skeleton import Skeleton, Unit

_RANDOM = Source("random", "", 0)
_PLACEHOLDER = Source("placeholder", "", 0)
_READS = (Tensor.tolist, Tensor.numpy, Tensor.__array__)  # values, and no operator notices
_HOOKS = (Tensor.register_hook, Tensor.register_post_accumulate_grad_hook)
_PLAIN_TENSORS = (Tensor, nn.Parameter)
_META = torch.device("meta")


class DryRun(PartRun, torch_private.DispatchMode):  # type: ignore[misc]
    """A run in which all units are followed and none computes.

    Args:
        skeleton: of the model.
        sample: the positional and the keyword arguments of the model.
        draw: in place of each random number that is drawn alone; the forward may decide with it which units it calls.
        computes_losses: whether units that return a single number compute it, with zeros for their parameters.

    Attributes:
        decides: whether the forward has read a random number.
    """

    def __init__(self, skeleton: Skeleton, sample: Arguments, draw: float, *, computes_losses: bool = False) -> None:
        torch_private.DispatchMode.__init__(self)
        own, named = mapped(Tensor, _own_copy, sample)
        message = Message.first(skeleton.adapter.inputs(own, named))
        self._copy, self._absent_units = skeleton.copy({*skeleton.units, *skeleton.own_parameters}, shares=False)
        self._model = type(skeleton.model).__name__
        span = PartSpan(Trace(self._model, parameters=names_of_arguments(self._copy)), 0, 0, is_last=True)
        device = next((tensor.device for tensor in tensors_in((own, named))), torch.device("cpu"))
        PartRun.__init__(self, span, message, device, skeleton.adapter.side_outputs)
        self._skeleton = skeleton
        self._draw = draw
        self._computes_losses = computes_losses
        self._order: list[str] = []
        self._changing: set[str] = set()
        self._left = LeftTensors(self._model)
        self._inputs: set[Source] = set()
        self._uses: dict[Source, set[float]] = defaultdict(set)
        self._sources: dict[int, set[Source]] = {}
        self._kept: list[Tensor] = []  # so that no other tensor gets the memory of one that is followed
        self._filled_in: dict[int, Tensor] = {}
        self._owned: dict[int, str] = {}  # by memory, the name of a parameter or a buffer, which glue must not change
        self._pauses = False
        self.decides = False

    def run(self) -> Any:
        """Runs the forward; returns what the model returns.

        Raises:
            CannotCut: the forward does what parts cannot do each for itself.
        """
        model, units = self._skeleton.model, self._skeleton.units
        self._mapped_inputs(self._follow_input)
        for name, parameter in self._skeleton.own_parameters.items():
            self._follow_leaves("parameter", name, parameter)
        for name, unit in units.items():
            self._follow_leaves("parameter", name, list(unit.parameters()))
            self._follow_leaves("buffer", name, other_tensors(unit))
        for name, tensor in (*model.named_parameters(), *model.named_buffers(), *self._copy.named_buffers()):
            self._kept.append(tensor)
            self._owned[memory_of(tensor)] = f"self.{name}"
        copies = dict(self._copy.named_modules())
        kept = KeptState(units, {name: copies[name] for name in self._skeleton.containers})
        arguments, keywords = self._message.inputs
        with random_states_put_back(self._device), torch.enable_grad(), runs.using(self):
            with _Functions(self), self:
                output = self._copy.forward(*arguments, **keywords)
            kept.refuse_changes(self._model, self._is_followed)
            result = self._skeleton.adapter.result(output)
            self._use(self._sources_of(held_by(result)), END)
        return result

    def trace(self) -> Trace:
        """What has been found.

        Raises:
            CannotCut: the forward computes with the values of its `parameters()`, or reads what a unit has changed.
        """
        for source in self._uses:
            if source.kind == "changed":
                raise CannotCut(
                    f"{source.name} changes in place what {self._model}'s forward reads again, and the change stays in "
                    f"one part: read what {source.name} returns, or compute a new tensor there (inplace=False)"
                )
        if _PLACEHOLDER in self._uses:
            raise CannotCut(
                f"{self._model}'s forward computes with the values of self.parameters(), of which each part has some "
                "only: compute it outside of the forward, or leave it to a unit"
            )
        changed = {call for call, tensor, version in self._returned if torch_private.version(tensor) != version}
        return Trace(
            self._model,
            tuple(self._order),
            {source: frozenset(positions) for source, positions in self._uses.items()},
            frozenset(changed),
            frozenset(self._changing),
            frozenset(self._inputs),
            self._span.trace.parameters,
        )

    def call(self, unit: Unit, arguments: tuple[Any, ...], keywords: Mapping[str, Any]) -> Any:
        """What the unit returns, without its values.

        A module without parameters may compute from inputs what the forward reads, such as lengths: it has its values.
        """
        name = unit.unit_name
        call = call_name(name, self._counts[name])
        self._counts[name] += 1
        given = tensors_in((arguments, keywords))
        computes = next(unit.parameters(), None) is None and not any(tensor.requires_grad for tensor in given)
        self._use(self._sources_of(held_by((arguments, keywords))), len(self._order))
        self._order.append(call)
        before = self._side_outputs.mark()
        try:
            with self._pausing(), torch.no_grad(), generators_put_back():
                output = self._form(call, unit, (arguments, dict(keywords)), computes=computes)
                of_library = torch_private.forward_hooks(self._absent_units[name])
                for hook in of_library.values():
                    hook(unit, arguments, output)
            beside = self._side_outputs.since(before)
        finally:
            self._side_outputs.remove(before)
        for leaf in flatten(output)[0]:
            if not isinstance(leaf, Tensor) and (hasattr(leaf, "__next__") or held_by(leaf)):
                raise CannotCut(
                    f"{call} returned an object of type {type(leaf).__name__}, which holds its tensors where they "
                    "cannot be sent to another part: return them in a tuple, list, dict or dataclass"
                )
        device = given[0].device if given and not given[0].is_meta else self._device
        output, beside = self._filled((output, beside), call, device, computes=computes)
        self._side_outputs.add(beside)
        if self._computes_losses and any(each.is_floating_point() and not each.dim() for each in tensors_in(output)):
            with self._pausing():
                zeros = {each: torch.zeros_like(own, device=self._device) for each, own in unit.named_parameters()}
                output = _compute(unit, zeros, (arguments, dict(keywords)))
        self._protect(call, output)
        return output

    def absent(self, tensor: Tensor | Absent) -> Tensor:
        """A tensor without values in place of a parameter; the forward may ask for its dtype and device only."""
        made = super().absent(tensor)
        self._follow(made, [_PLACEHOLDER])
        return made

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Runs an operator, and follows what it computes."""
        kwargs = dict(kwargs or {})
        self._left.refuse_reading(tensors_in((args, kwargs)))
        if self._pauses:
            return func(*args, **kwargs)
        written = [self._owned[key] for key in map(memory_of, _written(func, args, kwargs)) if key in self._owned]
        if written:
            raise CannotCut(
                f"{self._model}'s forward changes {written[0]} in place, outside of the units at which it is cut, and "
                "each part would change it: leave it to a unit, or do it outside of the forward"
            )
        args, kwargs = self._valued((args, kwargs))
        result = func(*args, **kwargs)
        given = tensors_in((args, kwargs))
        sources = self._sources_of(given)
        if torch.Tag.nondeterministic_seeded in func.tags:
            sources.add(_RANDOM)
            if isinstance(result, Tensor) and result.is_floating_point() and not result.dim():
                result.fill_(self._draw)
        made = tensors_in(result)
        if sources:
            for tensor in (*made, *(given if torch_private.changes_arguments(func) else ())):
                self._follow(tensor, sources)
        if not made:  # a number: the forward reads values, and will in every part
            self.decides |= _RANDOM in sources
            self._use(sources, END)
        return result

    def before_function(self, function: Any, args: tuple[Any, ...]) -> None:
        """Notes what the forward does to a tensor that no operator shows.

        Raises:
            CannotCut: it registers a hook on a tensor.
        """
        if self._pauses:
            return
        if function in _READS:
            self._use(self._sources_of(tensors_in(args)), END)
        if function in _HOOKS:
            raise CannotCut(
                f"{self._model}'s forward registers a hook on a tensor, outside of the units at which it is cut, and "
                "each part would register it again: leave it to a unit, or register a hook on a module"
            )

    def _follow(self, tensor: Tensor, sources: Iterable[Source]) -> None:
        """Notes from what a tensor was computed."""
        self._kept.append(tensor)
        self._sources.setdefault(memory_of(tensor), set()).update(sources)

    def _follow_leaves(self, kind: str, name: str, tree: Any) -> None:
        """Notes the tensors of a nested value as sources."""
        for number, leaf in enumerate(flatten(tree)[0]):
            if isinstance(leaf, Tensor):
                self._follow(leaf, [Source(kind, name, number)])

    def _follow_input(self, name: str, value: Any) -> None:
        self._follow_leaves("input", name, value)
        leaves = enumerate(flatten(value)[0])
        self._inputs.update(Source("input", name, number) for number, leaf in leaves if isinstance(leaf, Tensor))
        self._protect(input_name(name), value)

    def _is_followed(self, tensor: Tensor) -> bool:
        """Whether a tensor was computed from inputs, from what units returned, or from parameters."""
        return any(source.kind != "buffer" for source in self._sources.get(memory_of(tensor), ()))

    def _use(self, sources: Iterable[Source], position: float) -> None:
        """Notes that tensors of these sources go to the call at a position."""
        for source in sources:
            self._uses[source].add(position)

    def _sources_of(self, tensors: Iterable[Tensor]) -> set[Source]:
        return set().union(*(self._sources.get(memory_of(tensor), ()) for tensor in tensors))

    @contextlib.contextmanager
    def _pausing(self) -> Iterator[None]:
        """Inside, operators are not followed, as those of a unit; modules compute as without a run."""
        self._pauses = True
        try:
            with runs.using(None):
                yield
        finally:
            self._pauses = False

    def _valued(self, tree: Any) -> Any:
        """Arguments of an operator, with zeros for parameters and buffers of the meta device."""

        def zeros(tensor: Tensor) -> Tensor:
            if not tensor.is_meta:
                return tensor
            key = id(tensor)
            if key not in self._filled_in:
                self._kept.append(tensor)
                self._filled_in[key] = torch.zeros_like(tensor, device=self._device)
                self._follow(self._filled_in[key], self._sources_of([tensor]))
            return self._filled_in[key]

        arguments, keywords = mapped(Tensor, zeros, tree)
        if "device" in keywords and keywords["device"] == _META:
            keywords["device"] = self._device
        return arguments, keywords

    def _filled(self, tree: Any, call: str, device: torch.device, *, computes: bool) -> Any:
        """What a call returned, with zeros in place of its values unless it has computed them."""

        def zeros_for(tensor: Tensor) -> Tensor:
            if computes:
                return tensor.to(device)
            zeros = torch.zeros_like(tensor, device=device)
            if tensor.is_floating_point() and torch.is_grad_enabled():
                # No leaf, since the forward may change it in place; and not as large a leaf behind it.
                zeros += torch.zeros((), dtype=tensor.dtype, device=device, requires_grad=True)
            return zeros

        with self._pausing():
            filled = mapped(Tensor, zeros_for, tree)
        self._follow_leaves("call", call, filled)
        return filled

    def _form(self, call: str, unit: Unit, inputs: Arguments, *, computes: bool) -> Any:
        """What a unit returns on the meta device; of zeros if it reads values, or has tensors of other classes."""
        own = {name: tensor for name, tensor in _tensors_of(unit).items() if type(tensor) not in _PLAIN_TENSORS}
        if not own and not computes:
            mark = self._side_outputs.mark()
            try:
                return self._on(_META, call, unit, inputs)
            except CannotCut:
                raise
            except Exception:  # it reads values; if something else is wrong, that shows again
                self._side_outputs.remove(mark)
        for name, tensor in own.items():
            if tensor.is_meta:
                raise CannotCut(
                    f"{unit.unit_name}.{name} is a {type(tensor).__name__} on the meta device, and without values "
                    "nobody but its library can say what it gives: load such weights before the model is cut, on each "
                    "rank"
                )
        device = next((tensor.device for tensor in own.values()), self._device if computes else torch.device("cpu"))
        return self._on(device, call, unit, inputs, computes=computes)

    def _on(self, device: torch.device, call: str, unit: Unit, inputs: Arguments, *, computes: bool = False) -> Any:
        """What a unit returns on a device, with zeros for its tensors, or with copies of them if it computes.

        Its tensors of other classes than PyTorch's own stay as they are.
        """
        tensors = _tensors_of(unit)
        for name, tensor in tensors.items():
            if type(tensor) in _PLAIN_TENSORS:
                has_values = computes and not tensor.is_meta
                tensors[name] = tensor.clone() if has_values else torch.zeros_like(tensor, device=device)
        moved = mapped(Tensor, lambda tensor: tensor.detach().to(device, copy=True), inputs)
        before, inside = held_by(moved), tensors_in(moved)
        versions = [torch_private.version(tensor) for tensor in inside]
        self._left.calling = call
        try:
            with put_back([unit], values=False):
                output = _compute(unit, tensors, moved)
            self._left.note(before, moved, inputs)
        finally:
            self._left.calling = ""
        for given, tensor, version in zip(tensors_in(inputs), inside, versions, strict=True):
            if torch_private.version(tensor) != version:
                self._kept.append(given)
                self._changing.add(call)
                self._sources[memory_of(given)] = {Source("changed", call, 0)}
        return output


class _Functions(TorchFunctionMode):
    """Shows a dry run the methods of tensors that are no operators."""

    def __init__(self, run: DryRun) -> None:
        super().__init__()
        self._run = run

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._run.before_function(func, args)
        return func(*args, **(kwargs or {}))


def _tensors_of(unit: Unit) -> dict[str, Tensor]:
    return dict((*unit.named_parameters(), *unit.named_buffers()))


def _compute(unit: Unit, tensors: Mapping[str, Tensor], inputs: Arguments) -> Any:
    """What a unit computes without its hooks, with other tensors in place of its own, by their names."""
    plain = nn.Module()
    plain.unit, plain.forward = unit, unit.plain_forward
    return torch.func.functional_call(plain, {f"unit.{name}": each for name, each in tensors.items()}, *inputs)


def _own_copy(tensor: Tensor) -> Tensor:
    """A tensor that the forward may change in place."""
    copied = tensor.detach().clone()
    return copied.requires_grad_().clone() if tensor.requires_grad else copied


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """The tensors to which an operator writes; a batch norm writes its statistics, which its schema does not say."""
    if "batch_norm" in func.__name__ and "backward" not in func.__name__:
        return tensors_in(args[3:5]) if any(each is True for each in args[5:]) else []
    return torch_private.written_arguments(func, args, kwargs)
