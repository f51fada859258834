"""Whether a loss function of the user's own is what the pipe takes it for: a mean, weighed as the pipe does, or a sum.

After some mini-batches the function is called once more, with the outputs and targets of two micro-batches together. If
it can be computed in parts, that is the weighted mean, or the sum, of its values for each of them. The root of a mean
and a contrastive loss are neither. A mean that leaves padding out is not, either, where one of the two has more padding
than the other, so the two are those whose targets differ most:

    micro-batch              0          1          2          3
    targets               5 2 0 7    3 1 4 6    2 0 0 0    1 8 8 0
    share of the least      1/4        1/4        3/4        1/4     2 differs most
    share of the greatest   1/4        1/4        1/4        2/4     3 differs less
"""

from __future__ import annotations

import contextlib
import math
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor, nn
from torch.func import functional_call

from pipework import torch_private
from pipework.model.row_warnings import IGNORE
from pipework.runtime.random.unseen_draws import generators_left_alone
from pipework.runtime.stage.loss import MOST_BYTES
from pipework.values import nested
from pipework.values.nested import same

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pipework.model.loss.settings import LossSettings
    from pipework.runtime.stage.loss import InnerLoss, SeenLoss
    from pipework.runtime.transport import Message

_SOME: Final = 2**12  # targets of a micro-batch among which the most frequent value is looked for
_SUM: Final = 'It seems to be a sum: give loss_reduction="sum" and no loss_weight='
_OTHER_MEAN: Final = (
    "If it is a mean over rows, leave loss_reduction= and loss_weight= out; over something else, give loss_weight="
)


def loss_warnings(settings: LossSettings, loss: InnerLoss, rows: Sequence[int]) -> list[str]:
    """One text if the loss of two micro-batches together is not what the pipe makes of the loss of each.

    Nothing is known if they cannot be joined, if the function fails on them, has a state, or draws random numbers.

    Args:
        settings: of the loss.
        loss: of the mini-batch; what it has seen is dropped.
        rows: of the micro-batches.
    """
    pair, loss.seen = loss.seen or {}, None
    numbers, seen = sorted(pair), [each for _, each in sorted(pair.items()) if each is not None]
    if len(seen) == 2 and not torch_private.modes():  # a mode of the caller's may count calls
        # The step has succeeded, whatever the function makes of outputs that no layer has returned.
        with contextlib.suppress(Exception), torch.no_grad(), generators_left_alone([seen[0].value.device], 0):
            return _warnings(settings, loss, numbers, seen, [rows[number] for number in numbers])
    return []


class Pairs:
    """Chooses the two micro-batches, whose targets and inputs differ in what a loss may leave out.

    That is a value of many targets: the least (-100, -1, NaN), the greatest (255, the last token), 0, or the most
    frequent. A pair that shows nothing new is not worth a call.

    Example:
        >>> pairs = Pairs()
        >>> targets = [(torch.tensor(each),) for each in ([1, 2, 3], [2, 3, 1], [0, 0, 2])]
        >>> pairs.choose(targets), pairs.choose(targets)
        ((0, 2), None)
    """

    def __init__(self) -> None:
        self._known: dict[tuple[int, float], float] = {}  # by column and value, how its shares differed in pairs so far
        self._is_first = True

    def choose(self, tensors: Sequence[Sequence[Tensor]]) -> tuple[int, int] | None:
        """The pair that differs most beyond those so far; None: none does.

        Args:
            tensors: the targets of two or more micro-batches, cut along rows, and inputs, whose padding the loss may
                know from the output. On an accelerator the host waits for them.
        """
        columns = enumerate(zip(*tensors, strict=True))
        shares = {(number, value): each for number, column in columns for value, each in _shares(column).items()}
        gains = {key: max(each) - min(each) - self._known.get(key, 0.0) for key, each in shares.items()}
        is_first, self._is_first = self._is_first, False
        most = max(gains, key=gains.__getitem__, default=None)
        if most is None or gains[most] <= 0.0:
            return (0, 1) if is_first else None
        least, greatest = (shares[most].index(choice(shares[most])) for choice in (min, max))
        for key, each in shares.items():
            self._known[key] = max(self._known.get(key, 0.0), abs(each[least] - each[greatest]))
        return min(least, greatest), max(least, greatest)


@torch.no_grad()
def _shares(column: Sequence[Tensor]) -> dict[float, list[float]]:
    """By value that a loss may leave out, how large a part of each micro-batch's target it is."""
    plain = all(type(each) is Tensor and each.layout is torch.strided and each.numel() for each in column)
    if not plain or column[0].is_complex() or column[0].nbytes > MOST_BYTES:
        return {}
    is_float = column[0].is_floating_point()
    # NaN is less than all, and bytes would wrap around.
    flat = [each.flatten().float().nan_to_num(-math.inf) if is_float else each.flatten().long() for each in column]
    some = torch.cat([each[:: 1 + len(each) // _SOME] for each in flat]).cpu()
    least, greatest = (torch.stack([getattr(each, name)() for each in flat]) for name in ("min", "max"))
    values = torch.stack([least.min(), greatest.max(), torch.zeros_like(least[0]), some.mode().values.to(least)])
    counts = torch.stack([(each == values[:, None]).sum(1) for each in flat], 1)
    if is_float:  # of any number that is not repeated it is by chance
        counts *= (counts > 1) | values[:, None].isinf() | (values[:, None] == 0)
    return {
        value: [count / len(each) for count, each in zip(own, flat, strict=True)]
        for value, own in zip(values.tolist(), counts.tolist(), strict=True)
    }


def _warnings(
    settings: LossSettings, loss: InnerLoss, places: Sequence[int], seen: Sequence[SeenLoss], rows: Sequence[int]
) -> list[str]:
    one, other = (each.value.item() for each in seen)
    outputs = _joined(seen[0].output, seen[1].output, [False] * len(seen[0].output[0]), rows)
    shared = [here == there for here, there in zip(seen[0].places, seen[1].places, strict=True)]
    whole = _called(loss.function, outputs, _joined(seen[0].target, seen[1].target, shared, rows))
    taken = one + other
    if loss.weights is not None and settings.loss_reduction == "mean":
        shares = [float(loss.weights[place]) for place in places]
        taken = (shares[0] * one + shares[1] * other) / sum(shares)
    numbers = (whole, taken, one, other)
    least = _tolerance(seen[0]) * max(0.01, *map(abs, numbers))  # a loss near 0 is a difference of larger numbers
    if abs(whole - taken) <= least or not all(map(math.isfinite, numbers)):
        return []
    alone = _called(loss.function, *(nested.unflatten(*value) for value in (seen[0].output, seen[0].target)))
    if not abs(alone - one) <= least:
        return []  # it draws random numbers, or has a state
    mean = "mean over rows" if settings.loss_weight is None else "weighted mean"
    weighed = "sum" if settings.loss_reduction == "sum" else mean
    is_sum = abs(whole - one - other) <= least < min(abs(one), abs(other))
    advice = _SUM if is_sum else _OTHER_MEAN
    return [
        f"{loss.source} is no {weighed}: for micro-batches {places[0]} and {places[1]} together ({rows[0] + rows[1]} "
        f"rows) it gives {whole:.6g}, and its values for each, {one:.6g} and {other:.6g}, make {taken:.6g} in the pipe."
        f" So loss and gradients are not those of the whole mini-batch. {advice}; any other function of the batch "
        "belongs outside of the pipe: schedule='gpipe', and the loss of pipe(x). pipe.verify(x, target=y) shows more. "
        f"Otherwise {IGNORE}"
    ]


def _joined(one: Message, other: Message, shared: Sequence[bool], rows: Sequence[int]) -> Any:
    """The outputs or targets of two micro-batches, joined along rows.

    Args:
        one: of the one micro-batch.
        other: of the other.
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
