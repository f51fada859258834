"""Compares a model's loss of a few rows with what the pipe makes of its losses of single rows.

Training splits a mini-batch, and the loss of the whole is the mean of those of the micro-batches, or their sum, only if
no row changes the loss of another one, each micro-batch weighs as much as the model counts of it, and every tensor is
cut along its rows. All that shows in the numbers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor

from pipework.model.parts.check import evaluating, runs_here
from pipework.model.parts.execution.leaves import mapped, tensors_in

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pipework.model.parts.cut import Cuttable
    from pipework.model.parts.sample import Arguments


_FACTORS: Final = (1.0, 0.25, 0.5)


@dataclass(frozen=True)
class Weighed:
    """How the losses of micro-batches become that of the mini-batch.

    Attributes:
        target: the name of the argument that the loss needs.
        reduction: 'mean' or 'sum'.
        weight: of a micro-batch, from its target; None: its rows.
        argument_of: from the arguments of a micro-batch and a name to that argument; None: it has none.
        with_argument: these arguments with another value for that.
    """

    target: str
    reduction: str
    weight: Callable[[Any], Any] | None
    argument_of: Callable[[Arguments, str], Any]
    with_argument: Callable[[Arguments, str, Any], Arguments]

    def of(self, rows: Sequence[Arguments]) -> list[float]:
        """By what the loss of each row is multiplied."""
        if self.reduction == "sum":
            return [1.0] * len(rows)
        weight = _rows_of if self.weight is None else self.weight
        amounts = [float(weight(self.argument_of(row, self.target))) for row in rows]
        total = sum(amounts)
        return [amount / total if total else math.nan for amount in amounts]


def _rows_of(target: Any) -> int:
    return len(target) if isinstance(target, Tensor) and target.dim() else 1


def check_loss(
    cuttable: Cuttable, rows: Sequence[Arguments], kind: str, loss_of: Callable[[Any], Tensor], weighed: Weighed
) -> None:
    """Raises a ValueError if the pipe would train with another loss than the model itself has.

    The model runs in evaluation mode and without gradients, on the sample of the dry run, and on each of its parts.

    Args:
        cuttable: of the model; nothing is compared if it does not run as it is.
        rows: the parts of that sample: a row each, or what `split=` has made of it; none if the caller has made them.
        kind: what such a part is, "row" or "micro-batch".
        loss_of: reads the loss from what the model returns.
        weighed: what the pipe does.
    """
    if not runs_here(cuttable):
        return
    name, several = type(cuttable.model).__name__, {"row": "rows"}.get(kind, f"{kind}es")
    if len(rows) == 1:
        raise ValueError(
            f"the sample has one {kind}, so nothing shows whether the loss of {name} for a mini-batch is the "
            f"{weighed.reduction} of those of its micro-batches: give a sample of two {several} or more, or leave the "
            "comparison out with check=False"
        )
    if not rows:
        return
    sample, *rows = _told_apart(cuttable, rows, weighed) if kind == "row" else [cuttable.sample, *rows]
    with evaluating(cuttable.model):
        whole, precision = _run(cuttable, sample, loss_of)
        try:
            losses = [_run(cuttable, row, loss_of)[0] for row in rows]
        except Exception as error:
            raise ValueError(
                f"{name} does not run on one {kind} of the sample ({error}), so nothing shows whether its loss for a "
                f"mini-batch is the {weighed.reduction} of those of its micro-batches: leave the comparison out with "
                "check=False"
            ) from error
    weights = weighed.of(rows)
    combined = sum(weight * loss for weight, loss in zip(weights, losses, strict=True) if weight)
    if not math.isfinite(whole):
        raise ValueError(
            f"the loss of {name} for the first {len(rows)} {several} of the sample is {whole}, so it cannot be "
            f"compared: give {several} whose {weighed.target!r} count, or leave the comparison out with check=False"
        )
    if not _close(whole, combined, precision):
        raise ValueError(_text(f"{name} for {len(losses)} {several}", whole, losses, combined, precision, weighed))


def _told_apart(cuttable: Cuttable, rows: Sequence[Arguments], weighed: Weighed) -> list[Arguments]:
    """The sample and its rows, changed so that rows differ: of equal losses any mean is the same.

    Targets that are no classes are multiplied, and of the last row half of a mask is left out.
    """
    every = [cuttable.sample, *rows]
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
        every = [weighed.with_argument(each, name, value) for each, value in zip(every, changed, strict=True)]
    return every


def _run(cuttable: Cuttable, row: Arguments, loss_of: Callable[[Any], Tensor]) -> tuple[float, float]:
    """The loss, and the precision of the numbers that it was computed with."""
    model, adapter = cuttable.model, cuttable.adapter
    arguments, keywords = adapter.inputs(*mapped(Tensor, torch.clone, row))
    result = type(model).forward(model, *arguments, **adapter.comparable(keywords))
    numbers = (each for each in (*model.parameters(), *tensors_in(result)) if each.is_floating_point())
    return float(loss_of(adapter.result(result))), max(torch.finfo(each.dtype).eps for each in numbers)


def _close(left: float, right: float, precision: float) -> bool:
    # Kernels add in another order for another number of rows; float32 may be less precise on accelerators.
    least = 3e-4 if torch.accelerator.is_available() else 5e-5
    return math.isclose(left, right, rel_tol=max(2 * precision, least), abs_tol=precision)


def _text(name: str, whole: float, losses: Sequence[float], combined: float, precision: float, weighed: Weighed) -> str:
    total = sum(losses)
    if weighed.reduction == "mean" and _close(whole, total, precision):
        advice = "It is their sum: give attach loss_reduction='sum', or take a mean in the model"
    elif _close(whole, total / len(losses), precision):
        way = "leave loss_reduction='sum' out" if weighed.reduction == "sum" else "loss_weight=len says so"
        advice = f"It is their mean over rows: {way}"
    else:
        advice = (
            "Usual reasons: the model computes with several rows together, such as a contrastive loss, negatives of "
            "the batch or the root of a mean: then the loss belongs outside of the pipe, with schedule='gpipe', a call "
            f"without {weighed.target!r}, and the loss of what it returns. Or it is a mean over something else than "
            "the weights say, such as tokens that count: give loss_weight=. Or a tensor is not cut along its rows: "
            "mark it in the sample with Chunk(value, dim=...) or NoChunk(value), or cut batches with split="
        )
    weights = "mean over rows" if weighed.weight is None else "mean by loss_weight"
    kind = "sum" if weighed.reduction == "sum" else weights
    return (
        f"the loss of {name} of the sample is {whole:.6g}, and the pipe would train with "
        f"{combined:.6g}, the {kind} of its losses for each of them ({', '.join(f'{loss:.6g}' for loss in losses)}). "
        f"{advice}. check=False leaves the comparison out"
    )
