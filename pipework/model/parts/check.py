"""Compares the parts of a model with the model itself on the sample, so that no difference stays unnoticed.

`check_parts` compares what they return. `check_rows` compares the model's loss of a few rows with what the pipe makes
of its losses of single rows, and likewise what it returns beside the loss. Training splits a mini-batch, and the loss
of the whole is the mean of those of the micro-batches, or their sum, only if no row changes the loss of another row,
each micro-batch weighs as much as the model counts in it, and every tensor is cut along its rows. A comparison of the
losses shows all three.
"""

from __future__ import annotations

import contextlib
import math
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor, nn

from pipework import torch_private
from pipework.model.marks import MIXED
from pipework.model.parts.leaves import flatten, mapped, tensors_in
from pipework.model.parts.outputs import tensors_by_name
from pipework.model.parts.side_effects import in_mode, put_back, random_states_put_back
from pipework.values import nested

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from pipework.model.parts.adapter import Adapter
    from pipework.model.parts.cut import Cuttable
    from pipework.model.parts.sample import Arguments, ForwardArguments, LossPlace
    from pipework.model.parts.side_effects import Attributes

_FACTORS: Final = (1.0, 0.25, 0.5)
_LEFT_OUT: Final = frozenset([-100, -1, 0])  # the classes that losses usually leave out; the first is PyTorch's


def check_parts(cuttable: Cuttable, layers: nn.Sequential, before: Attributes) -> None:
    """Raises a ValueError if the parts give another result for the rows of the dry run than the model itself.

    Both run in evaluation mode and without gradients. Flags, buffers and random states stay as they are.

    Args:
        cuttable: of the model; nothing is compared if a part of it is on the meta device.
        layers: the parts.
        before: the attributes with which the model runs: those that it had before it was cut.
    """
    if not runs_here(cuttable):
        return
    model = cuttable.model
    arguments, keywords = cuttable.adapter.inputs(*cuttable.sample)
    with evaluating(model, layers):
        own, named = mapped(Tensor, torch.clone, (arguments, keywords))
        with put_back([model], values=False):
            before.put_back()
            with in_mode(model.modules(), training=False):
                expected = cuttable.adapter.result(type(model).forward(model, *own, **named))
        own, named = mapped(Tensor, torch.clone, (arguments, keywords))
        where = _difference(expected, layers[1:](layers[0](*own, **named)))
    if where is not None:
        raise ValueError(
            f"the parts of {type(model).__name__} give another result than the model itself for the sample: {where}. "
            "Something of its forward cannot be followed; put it into a unit (a module that the forward calls), or "
            "name larger units with blocks=. check=False leaves the comparison out"
        )


def runs_here(cuttable: Cuttable) -> bool:
    """Whether the model itself can run as it is: it has values, and all of it is on the device of the sample."""
    model = cuttable.model
    devices = {tensor.device for tensor in (*model.parameters(), *tensors_in(cuttable.sample))}
    return len(devices) <= 1 and not any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))


@contextlib.contextmanager
def evaluating(*modules: nn.Module) -> Iterator[None]:
    """Evaluation mode without gradients or chance; afterwards attributes, buffers and random states are as before."""
    every = [each for module in modules for each in module.modules()]
    device = next((each.device for module in modules for each in module.parameters()), torch.device("cpu"))
    kept = put_back(modules, values=True)
    with kept, in_mode(every, training=False), torch.no_grad(), random_states_put_back(device), _FixedDraws():
        yield


class _FixedDraws(torch_private.DispatchMode):  # type: ignore[misc]
    """Inside, each number that is drawn is 0.5, or the least integer.

    With a seed, a row alone would draw other noise than in its mini-batch, and a part other noise than the model.
    """

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if torch_private.only_draws(func):
            named = torch_private.arguments_by_name(func, args, kwargs or {})
            result.fill_(0.5 if result.is_floating_point() else named.get("low", named.get("from", 0)))
        return result


def _difference(expected: Any, actual: Any) -> str | None:
    """Where two results differ, and how; None: they are the same."""
    wanted, form = flatten(expected)
    got, other = flatten(actual)
    if [type(leaf) for leaf in wanted] != [type(leaf) for leaf in got] or not nested.same(form, other):
        return f"wanted {form}, got {other}"
    try:
        torch.testing.assert_close(tensors_in(actual), tensors_in(expected), rtol=0, atol=0, equal_nan=True)
    except AssertionError as error:
        return " ".join(str(error).split())
    return None


@dataclass(frozen=True)
class Weighed:
    """How the losses of micro-batches become that of the mini-batch.

    Attributes:
        forward: the arguments of the model, of which the loss needs one.
        place: of the loss in what the model returns.
        reduction: 'mean' or 'sum'.
        weight: of a micro-batch, from its target; None: its rows.
        adapter: of the model's library, which says what of a target counts.
    """

    forward: ForwardArguments
    place: LossPlace
    reduction: str
    weight: Callable[[Any], Any] | None
    adapter: Adapter

    @property
    def target(self) -> str:
        """The name of the argument that the loss needs."""
        return str(self.forward.target)

    def argument_of(self, given: Arguments, name: str) -> Any:
        """One of the arguments, of the target what counts; None: it is not given."""
        names = self.forward.by_name(*given)
        return self.adapter.counted(name, names) if name == self.target else names.get(name)

    def of(self, rows: Sequence[Arguments]) -> list[float]:
        """The factor of each row's loss in that of the mini-batch."""
        if self.reduction == "sum":
            return [1.0] * len(rows)
        weight = _rows_of if self.weight is None else self.weight
        amounts = [float(weight(self.argument_of(row, self.target))) for row in rows]
        total = sum(amounts)
        return [amount / total if total else math.nan for amount in amounts]


def _rows_of(target: Any) -> int:
    return len(target) if isinstance(target, Tensor) and target.dim() else 1


def check_rows(
    cuttable: Cuttable, rows: Sequence[Arguments], kind: str, weighed: Weighed | None, dims: dict[str, int] | None
) -> None:
    """Raises a ValueError if the pipe would train with another loss than the model itself has.

    The model runs in evaluation mode and without gradients, on the sample of the dry run, and on each of its rows. What
    it returns is compared, too. If that differs where the loss is right, the pipe will leave it out.

    Args:
        cuttable: of the model; nothing is compared if it does not run as it is.
        rows: the arguments for each row of that sample, or for each micro-batch that `split=` has made of it; none if
            the caller has made the micro-batches.
        kind: "row" or "micro-batch".
        weighed: what the pipe does with the model's losses; None: it has none, and what it returns must be right.
        dims: see `output_dims`; what differs gets `MIXED`. None: nothing is known.
    """
    if not runs_here(cuttable) or not rows or (weighed is None and dims is None):
        return
    name, several = type(cuttable.model).__name__, {"row": "rows"}.get(kind, f"{kind}es")
    if len(rows) == 1:
        raise _unknown(
            name, weighed, f"the sample has one {kind}: give a sample of two {several} or more, or cut sequences that "
            "are packed into one row with split="
        )  # fmt: skip
    sample, *rows = _told_apart(cuttable, rows, weighed) if kind == "row" else [cuttable.sample, *rows]
    with evaluating(cuttable.model):
        result = _run(cuttable, sample)
        try:
            results = [_run(cuttable, row) for row in rows]
        except Exception as error:
            raise _unknown(name, weighed, f"the model does not run on one {kind} of the sample ({error})") from error
    precision = _precision(cuttable, result)
    mixed = _mixed(result, results, dims or {}, precision)
    if weighed is not None:
        whole, *losses = (float(weighed.place.read(each)) for each in (result, *results))
        if not math.isfinite(whole):
            why = f"the loss for the first {len(rows)} {several} of the sample is {whole}"
            raise _unknown(name, weighed, f"{why}: give {several} whose {weighed.target!r} count")
        combined = sum(weight * loss for weight, loss in zip(weighed.of(rows), losses, strict=True) if weight)
        if not _close(whole, combined, precision):
            raise ValueError(_text(f"{name} for {len(losses)} {several}", whole, losses, combined, weighed))
        own = {name for name, each in tensors_by_name(result).items() if each is weighed.place.read(result)}
        if dims is not None:
            dims.update(dict.fromkeys(set(mixed) - own, MIXED))
    elif mixed:
        raise ValueError(
            f"{name} returns another {', '.join(mixed)} for the first {len(rows)} rows of the sample together than for "
            "each of them alone, and the pipe joins what it returns for micro-batches. Either it is a loss: name the "
            "argument that it needs with target=. Or the model computes with several rows together: return what has "
            "rows, and do that outside of the pipe. Or a tensor is not cut along its rows: mark it in the sample with "
            "Chunk(value, dim=...) or NoChunk(value), or cut batches with split=. check=False leaves the comparison out"
        )


def left_out(cuttable: Cuttable, rows: Sequence[Arguments], weighed: Weighed) -> tuple[int, ...]:
    """The classes that the model's own loss leaves out beside -100, among the usual ones and those of the sample.

    Each is tried where the pipe weighs rows: it stands in the second half of the last row then. If it is left out, the
    loss is no mean over rows any more. Of which rows have unequally many, `check_rows` has shown that it counts. What
    may be left out makes place for such a class, so that what is tried never stands for another that is left out:

        sample    5 3 2 0    7 5 4 0    5 may count or not, and 0
        with 0    3 3 2 3    7 3 0 0    no mean over rows if 0 is left out

    Args:
        cuttable: of the model.
        rows: the arguments for each row of the sample.
        weighed: what the pipe does with the model's losses.
    """
    whole, *own = (weighed.argument_of(each, weighed.target) for each in (cuttable.sample, *rows))
    classes = isinstance(whole, Tensor) and whole.dtype is torch.int64 and whole.dim() > 1 and whole.numel()
    if not classes or not own or not runs_here(cuttable) or weighed.weight is not None or weighed.reduction == "sum":
        return ()
    counts = [Counter(each.flatten().tolist()) for each in own]
    equal = [value for value in counts[0] if len({each[value] for each in counts}) == 1]
    counted = sorted(value for value in set().union(*counts) - set(equal) if value >= 0)
    usual = {-1, 0} if whole.is_cpu else {0}  # an accelerator does not survive -1 where it is no class
    often = [min(equal), max(equal), max(equal, key=counts[0].__getitem__)] if equal else []
    tried = {*usual, *often} - {*counted, -100}
    doubtful = _LEFT_OUT.union(equal if counted else often)
    other = next(iter(counted or sorted(set(equal) - doubtful) or sorted(set(equal) - _LEFT_OUT)), None)
    if other is None:
        return ()
    places = torch.tensor(sorted(doubtful - {other}), device=whole.device)
    own = [each.masked_fill(torch.isin(each, places), other) for each in own]
    half, changed_in, found = own[-1].shape[-1] // 2, weighed.forward.with_arguments, []
    for value in sorted(tried):
        last = torch.cat([own[-1][..., :half], torch.full_like(own[-1][..., half:], value)], -1)
        changed = [torch.cat([*own[:-1], last]), *own[:-1], last]
        every = zip((cuttable.sample, *rows), changed, strict=True)
        with contextlib.suppress(Exception), evaluating(cuttable.model):
            results = [_run(cuttable, changed_in(each, {weighed.target: labels})) for each, labels in every]
            loss, *losses = (float(weighed.place.read(each)) for each in results)
            combined = sum(weight * each for weight, each in zip(weighed.of(rows), losses, strict=True))
            if math.isfinite(loss) and not _close(loss, combined, _precision(cuttable, results[0])):
                found.append(value)
    return tuple(found)


def _mixed(result: Any, results: Sequence[Any], dims: Mapping[str, int], precision: float) -> list[str]:
    """The names of the tensors of a result that are other ones than those of its rows, joined.

    Args:
        result: of the sample.
        results: of its rows.
        dims: see `output_dims`.
        precision: of the numbers.
    """
    # As in `_close`, but of many numbers, which no mean makes more precise.
    tolerance = max(16 * precision, 1e-2 if torch.accelerator.is_available() else 1e-3)
    parts = [tensors_by_name(each) for each in results]

    def is_other(name: str, whole: Tensor) -> bool:
        column = [part[name] for part in parts if name in part]
        try:
            joined = torch.cat(column, dims[name]) if whole.dim() else torch.stack(column).double().mean()
        except (IndexError, RuntimeError):  # those of rows differ in other sizes
            return True
        if joined.shape != whole.shape:
            return True
        # Of integers with dimensions, classes may be others where scores are equal.
        is_compared = whole.is_floating_point() or not whole.dim()
        return is_compared and bool((joined.double() - whole).norm() > tolerance * whole.double().norm())

    there = tensors_by_name(result).items()
    return [name for name, whole in there if dims.get(name, MIXED) != MIXED and is_other(name, whole)]


def _unknown(name: str, weighed: Weighed | None, why: str) -> ValueError:
    what = "what {name} returns for a mini-batch is what it returns for its micro-batches"
    if weighed is not None:
        what = "the loss of {name} for a mini-batch is the {weighed.reduction} of those of its micro-batches"
    return ValueError(
        f"nothing shows whether {what.format(name=name, weighed=weighed)}, since {why}; or leave the comparison out "
        "with check=False"
    )


def _told_apart(cuttable: Cuttable, rows: Sequence[Arguments], weighed: Weighed | None) -> list[Arguments]:
    """The sample and its rows, changed so that the losses of rows differ: any mean of equal losses is the same.

    Targets that are no classes are multiplied by other factors in each row, and a mask loses half of its last row.
    """
    every = [cuttable.sample, *rows]
    if weighed is None:
        return every
    changed_in = weighed.forward.with_arguments
    for name in (weighed.target, *cuttable.adapter.masks):
        whole, *own = (weighed.argument_of(each, name) for each in every)
        if not isinstance(whole, Tensor) or whole.dim() < (2 if name in cuttable.adapter.masks else 1):
            continue
        dim = next((n for n, size in enumerate(own[0].shape) if size != whole.shape[n]), 0)
        if name != weighed.target and whole.dim() == 2:
            places = own[-1].nonzero()
            own[-1] = own[-1].index_put(tuple(places[len(places) // 2 :].T), own[-1].new_zeros(()))
        elif name == weighed.target and whole.is_floating_point():  # some losses want them from 0 to 1
            own = [each * factor for each, factor in zip(own, _FACTORS, strict=False)]
        else:
            continue
        changed = [torch.cat(own, dim), *own]
        every = [changed_in(each, {name: value}) for each, value in zip(every, changed, strict=True)]
    return every


def _run(cuttable: Cuttable, row: Arguments) -> Any:
    """What the model returns for a row."""
    model, adapter = cuttable.model, cuttable.adapter
    arguments, keywords = adapter.inputs(*mapped(Tensor, torch.clone, row))
    return adapter.result(type(model).forward(model, *arguments, **adapter.comparable(keywords)))


def _precision(cuttable: Cuttable, result: Any) -> float:
    """That of the least precise numbers that the model computes with."""
    numbers = (each for each in (*cuttable.model.parameters(), *tensors_in(result)) if each.is_floating_point())
    return max((torch.finfo(each.dtype).eps for each in numbers), default=0.0)


def _close(left: float, right: float, precision: float) -> bool:
    # Kernels add in another order for another number of rows; float32 may be less precise on accelerators.
    least = 3e-4 if torch.accelerator.is_available() else 5e-5
    return math.isclose(left, right, rel_tol=max(2 * precision, least), abs_tol=precision)


def _text(name: str, whole: float, losses: Sequence[float], combined: float, weighed: Weighed) -> str:
    return (
        f"the loss of {name} of the sample is {whole:.6g}, and the pipe would train with {combined:.6g}, the "
        f"{'sum' if weighed.reduction == 'sum' else 'weighted mean'} of its losses for each of them "
        f"({', '.join(f'{loss:.6g}' for loss in losses)}). Usual reasons: it is their sum, give loss_reduction='sum'; "
        "or their mean over rows, give loss_weight=len; or a mean over something else than the weights say, such as "
        "tokens that count, give loss_weight=. Or the model computes with several rows together, such as a contrastive "
        "loss, negatives of the batch or the root of a mean: then the loss belongs outside of the pipe, with "
        f"schedule='gpipe', a call without {weighed.target!r}, and the loss of what it returns. Or a tensor is not cut "
        "along its rows: mark it in the sample with Chunk(value, dim=...) or NoChunk(value), or cut batches with "
        "split=. check=False leaves the comparison out"
    )
