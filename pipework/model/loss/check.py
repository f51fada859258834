"""Whether a loss function of the user's own is a mean, or a sum, over rows: only then can a pipe compute it in parts.

After the first mini-batch the function is called once more, with the outputs and targets of two micro-batches
together. If it is a mean over rows, that is the weighted mean of its values for each of them. The root of a mean, a
contrastive loss or a sum is not. A function of which a further call might be noticed is not called (`pure_function`).
"""

from __future__ import annotations

import contextlib
import functools
import math
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor, nn

from pipework import torch_private
from pipework.model.loss.inner_function import InnerFunction
from pipework.model.loss.pure_function import PureFunction, is_plain
from pipework.model.rows import IGNORE
from pipework.runtime.caller_modes import Modes
from pipework.runtime.random.on_devices import generators_left_alone
from pipework.runtime.stage.loss_sample import MOST_BYTES, LossSample
from pipework.values import nested
from pipework.values.equality import same

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pipework.runtime.stage.loss import InnerLoss
    from pipework.runtime.stage.loss_sample import Kept


def may_be_other(function: Any) -> bool:
    """Whether a loss function may be no mean or sum over rows: it is none of PyTorch's, which say what they are.

    Example:
        >>> may_be_other(nn.MSELoss()), may_be_other(nn.functional.l1_loss), may_be_other(lambda output, target: output)
        (False, False, True)
    """
    function = InnerFunction.of(function).function
    if isinstance(function, nn.Module):
        return type(function).__module__ != nn.modules.loss.__name__
    return function is not None and getattr(function, "__module__", "") != nn.functional.__name__


class LossCheck:
    """The check of one loss function, from before a mini-batch until after it.

    Attributes:
        sample: of the mini-batch.
    """

    def __init__(self, function: PureFunction) -> None:
        self._function = function
        self.sample = LossSample()

    @classmethod
    def of(cls, function: Any) -> Self | None:
        """None if nothing is to be checked, or the further call might be noticed, as by a mode of the caller's."""
        if not may_be_other(function) or Modes.capture():
            return None
        pure = PureFunction.of(function, MOST_BYTES)
        return None if pure is None else cls(pure)

    def doubts(self, loss: InnerLoss, rows: Sequence[int]) -> list[str]:
        """One text if the loss of two micro-batches together is not what the pipe makes of the loss of each.

        Nothing is known if outputs cannot be joined, if the function fails on them, has a state, or draws random
        numbers. The sample is empty afterwards.

        Args:
            loss: of the mini-batch.
            rows: of the micro-batches.
        """
        pairs, values = self.sample.take()
        if len(values) < 2 or self._function.has_changed_tensors:
            return []
        shares = (1.0, 1.0) if loss.weights is None else tuple(map(float, loss.weights[:2]))
        total = sum(shares) if loss.weights is not None else 1.0
        # The step has succeeded, whatever the function makes of outputs that no layer has returned.
        with contextlib.suppress(Exception), torch.no_grad(), generators_left_alone(values[0].device):
            parts = [value.item() for value in values]
            combined = sum(share / total * part for share, part in zip(shares, parts, strict=True))
            outputs, targets = zip(*pairs, strict=True)
            together = _together(outputs, rows, may_be_whole=False), _together(targets, rows, may_be_whole=True)
            whole = self._called(*together)
            least = _tolerance(pairs[0][0], values[0])
            close = functools.partial(_close, scale=max(map(abs, (whole, combined, *parts))), tolerance=least)
            if not all(map(math.isfinite, (whole, combined, *parts))) or close(whole, combined):
                return []
            alone = [nested.unflatten(kept.tensors, kept.structure) for kept in pairs[0]]
            if close(self._called(*alone), parts[0]):  # else it draws random numbers, or has a state
                return [_text(loss, combined, whole, rows, is_sum=close(whole, sum(parts)))]
        return []

    def _called(self, output: Any, target: Any) -> float:
        # Compiled, it would be compiled anew for other rows, and perhaps for any number of them.
        value = self._function.uncompiled()(output, target)
        if not isinstance(value, Tensor) or value.dim():
            raise _UnknownError
        return value.item()


def _text(loss: InnerLoss, combined: float, whole: float, rows: Sequence[int], *, is_sum: bool) -> str:
    if loss.weights is None:
        kind, advice = "sum", "If it is a mean, leave loss_reduction out"
    elif is_sum:
        kind, advice = "mean", 'It seems to be a sum: give Pipe loss_reduction="sum"'
    else:
        kind, advice = "mean", "If it is a mean over something else, such as tokens, give Pipe loss_weight="
    return (
        f"{loss.source} is no {kind} over rows: for the first two micro-batches together ({rows[0] + rows[1]} rows) it "
        f"gives {whole:.6g}, and the {kind} of its values for each, which the pipe takes, is {combined:.6g}. So loss "
        f"and gradients are not those of the whole mini-batch. {advice}; any other function of the whole batch belongs "
        f"outside of the pipe: schedule='gpipe', and the loss of pipe(x). Otherwise {IGNORE}"
    )


class _UnknownError(Exception):
    """It cannot be told what the loss of the whole is."""


def _together(both: Sequence[Kept], rows: Sequence[int], *, may_be_whole: bool) -> Any:
    """Two outputs or two targets, joined along rows.

    Raises:
        _UnknownError: they are not made of rows, or hold objects that the function may change.
    """
    one, other = both
    leaves = () if one.structure is None else one.structure.leaves
    if not all(isinstance(leaf, nested.Place) or is_plain(leaf) for leaf in leaves):
        raise _UnknownError
    if len(one.tensors) != len(other.tensors) or not same(one.structure, other.structure):
        raise _UnknownError
    joined = []
    for number, (first, second) in enumerate(zip(one.tensors, other.tensors, strict=True)):
        if may_be_whole and one.places[number] == other.places[number]:  # every micro-batch got all of it
            joined.append(first)
        elif _are_rows(first, second, rows):
            joined.append(torch.cat([first, second]))
        else:
            raise _UnknownError
    return nested.unflatten(tuple(joined), one.structure)


def _are_rows(first: Tensor, second: Tensor, rows: Sequence[int]) -> bool:
    """Whether two tensors have equally many entries for each row, and are not one that has nothing to do with rows."""
    if not first.dim() or not second.dim() or first.shape[1:] != second.shape[1:]:
        return False
    each, rest = divmod(first.shape[0], rows[0])
    return not rest and second.shape[0] == each * rows[1] and not torch.equal(first, second)


def _tolerance(output: Kept, value: Tensor) -> float:
    """How much two ways of summing differ at most, relative to the loss."""
    dtypes = [tensor.dtype for tensor in (*output.tensors, value) if tensor.is_floating_point()]
    epsilon = max(torch.finfo(dtype).eps for dtype in dtypes)
    if torch_private.any_autocast():
        epsilon = max(epsilon, torch.finfo(torch.bfloat16).eps)
    # On an accelerator products in float32 may have the precision of TF32.
    least = 1e-4 if value.device.type == "cpu" else 2e-3
    return max(8 * epsilon, least) if epsilon > 1e-10 else 1e-8


def _close(one: float, other: float, *, scale: float, tolerance: float) -> bool:
    # A loss near 0 is a difference of larger numbers.
    return abs(one - other) <= tolerance * max(scale, 0.01)
