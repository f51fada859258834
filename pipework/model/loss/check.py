"""Whether a loss function of the user's own is what the pipe takes it for: a mean, weighed as the pipe does, or a sum.

After the first mini-batch the function is called once more, with the outputs and targets of two micro-batches
together. If it can be computed in parts, that is the weighted mean, or the sum, of its values for each of them. The
root of a mean and a contrastive loss are neither.
"""

from __future__ import annotations

import contextlib
import math
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import nn
from torch.func import functional_call

from pipework import torch_private
from pipework.model.row_warnings import IGNORE
from pipework.runtime.random.unseen_draws import generators_left_alone
from pipework.values import nested
from pipework.values.nested import same

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pipework.model.loss.settings import LossSettings
    from pipework.runtime.stage.loss import InnerLoss, SeenLoss
    from pipework.runtime.transport import Message

_SUM: Final = 'It seems to be a sum: give Pipe loss_reduction="sum"'


def loss_warnings(settings: LossSettings, loss: InnerLoss, rows: Sequence[int]) -> list[str]:
    """One text if the loss of two micro-batches together is not what the pipe makes of the loss of each.

    Nothing is known if they cannot be joined, if the function fails on them, has a state, or draws random numbers.

    Args:
        settings: of the loss.
        loss: of the mini-batch; what it has seen is dropped.
        rows: of the micro-batches.
    """
    seen, loss.seen = loss.seen or [], None
    if len(seen) == 2 and not torch_private.modes():  # a mode of the caller's may count calls
        # The step has succeeded, whatever the function makes of outputs that no layer has returned.
        with contextlib.suppress(Exception), torch.no_grad(), generators_left_alone([seen[0].value.device], 0):
            found = _warning(settings, loss, seen, rows)
            return [] if found is None else [found]
    return []


def _warning(settings: LossSettings, loss: InnerLoss, seen: Sequence[SeenLoss], rows: Sequence[int]) -> str | None:
    one, other = (each.value.item() for each in seen)
    outputs = _joined(seen[0].output, seen[1].output, [False] * len(seen[0].output[0]), rows)
    shared = [here == there for here, there in zip(seen[0].places, seen[1].places, strict=True)]
    whole = _called(loss.function, outputs, _joined(seen[0].target, seen[1].target, shared, rows))
    taken = one + other
    if loss.weights is not None and settings.loss_reduction == "mean":
        shares = [float(weight) for weight in loss.weights[:2]]
        taken = (shares[0] * one + shares[1] * other) / sum(shares)
    numbers = (whole, taken, one, other)
    least = _tolerance(seen[0]) * max(0.01, *map(abs, numbers))  # a loss near 0 is a difference of larger numbers
    if abs(whole - taken) <= least or not all(map(math.isfinite, numbers)):
        return None
    alone = _called(loss.function, *(nested.unflatten(*value) for value in (seen[0].output, seen[0].target)))
    if not abs(alone - one) <= least:
        return None  # it draws random numbers, or has a state
    mean = "mean over rows" if settings.loss_weight is None else "weighted mean"
    weighed = "sum" if settings.loss_reduction == "sum" else mean
    advice = "If it is a mean over rows, leave loss_reduction= and loss_weight= out; over something else, give Pipe "
    advice += "loss_weight="
    if abs(whole - one - other) <= least < min(abs(one), abs(other)):
        advice = f"{_SUM} and no loss_weight="
    return (
        f"{loss.source} is no {weighed}: for the first two micro-batches together ({rows[0] + rows[1]} rows) it gives "
        f"{whole:.6g}, and its values for each, {one:.6g} and {other:.6g}, make {taken:.6g} in the pipe. So loss and "
        f"gradients are not those of the whole mini-batch. {advice}; any other function of the whole batch belongs "
        "outside of the pipe: schedule='gpipe', and the loss of pipe(x). pipe.verify(x, target=y) compares everything. "
        f"Otherwise {IGNORE}"
    )


def _joined(one: Message, other: Message, shared: Sequence[bool], rows: Sequence[int]) -> Any:
    """The outputs or targets of the first two micro-batches, joined along rows.

    Args:
        one: of the first micro-batch.
        other: of the second.
        shared: for each tensor, whether both micro-batches got all of it.
        rows: of the micro-batches.

    Raises:
        ValueError: they are not made of rows.
    """
    joined = []
    for first, second, is_shared in zip(one[0], other[0], shared, strict=True):
        # A number that is the same for both, such as the temperature of a contrastive loss, is that of both together.
        is_whole = is_shared or (not first.dim() and torch.equal(first, second))
        each, rest = divmod(0 if is_whole else len(first), rows[0])
        # Equal tensors may have nothing to do with rows.
        if not is_whole and (rest or len(second) != each * rows[1] or torch.equal(first, second)):
            raise ValueError
        joined.append(first if is_whole else torch.cat([first, second]))
    if not same(one[1], other[1]):
        raise ValueError
    return nested.unflatten(tuple(joined), one[1])


def _called(function: Any, output: Any, target: Any) -> float:
    """The loss, computed by a function that is not compiled: it would be compiled anew for other rows."""
    function = torch_private.uncompiled(function)
    if isinstance(function, nn.Module):  # its buffers do not see the call
        buffers = {name: buffer.clone() for name, buffer in function.named_buffers()}
        return float(functional_call(function, buffers, (output, target)).item())
    return float(function(output, target).item())


def _tolerance(seen: SeenLoss) -> float:
    """How much two ways of summing differ at most, relative to the loss."""
    dtypes = [tensor.dtype for tensor in (*seen.output[0], seen.value) if tensor.is_floating_point()]
    dtypes += [torch.bfloat16] if torch_private.any_autocast() else []
    epsilon = max(torch.finfo(dtype).eps for dtype in dtypes)
    # On an accelerator products in float32 may have the precision of TF32.
    least = 1e-4 if seen.value.is_cpu else 2e-3
    return max(8 * epsilon, least) if epsilon > 1e-10 else 1e-8
