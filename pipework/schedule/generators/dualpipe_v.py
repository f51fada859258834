"""DualPipeV: pairs of a forward and a backward, so that transfers of one overlap with work of the other."""

from __future__ import annotations

from collections import deque

from pipework.schedule.action import Action
from pipework.schedule.argument_checks import positive_integers
from pipework.schedule.generators.orders import numbered
from pipework.schedule.placement import wave_placement
from pipework.schedule.schedule import Schedule


def dualpipe_v(workers: int, micro_batches: int) -> Schedule:
    """Pair the forward of one stage of each worker with the backward of its other stage.

    ::

        worker 0  0F0 0F1 0F2 3F0 3I0 3W0 3F1 0F3 3B1---- 3F2 0B0---- 3B2---- 3F3  .  0B1---- 3B3---- 0B2---- 0I3 0W3
        worker 1   .  1F0 2F0 1F1 2F1 1F2 2B0---- 2F2 1B0---- 1F3 2B1---- 2F3 1B1---- 2B2---- 1B2---- 2I3 1I3 2W3 1W3

    Worker d fills the pipe with 2(p - d - 1) forwards of its first stage and d + 1 of each stage in turn. Then it runs
    p - d - 1 split backwards of its second stage, then the pairs: ``F`` of its first stage with ``B`` of its second,
    ``F`` of its second stage with ``B`` of its first. While the pipe drains, whole backwards come first, and the last p
    are split.

    Here the actions of a pair run one after the other, and the result of the first is sent while the second runs. A
    device that runs both at the same time uses the resources that each alone leaves idle; other devices are better off
    with ZB-V.

    Of p workers and m micro-batches, with F, I and W the time of a forward and the halves of a backward of a worker's
    whole share: where F = I = W and m is at least p, the bubble is (p - 1)F/2, that of ZB-V; with pairs that start and
    end together it is (p - 1)F, that of ZB-H1. A worker holds up to min(m, p + 1/2) micro-batches of the activations of
    its share.

    Source: DeepSeek-AI, DeepSeek-V3 Technical Report, arXiv 2412.19437, which describes DualPipe, and the DualPipe
    repository, which describes this half of it.

    Args:
        workers: number of workers p; worker d has the stages d and 2p - 1 - d.
        micro_batches: number of micro-batches m; any.

    Example:
        >>> [str(action) for action in dualpipe_v(2, 4).orders[1]][:8]
        ['1F0', '2F0', '1F1', '2F1', '1F2', '2B0', '2F2', '1B0']
    """
    positive_integers(workers=workers, micro_batches=micro_batches)
    orders = tuple(_order(worker, workers, micro_batches) for worker in range(workers))
    return Schedule("dualpipe-v", wave_placement(workers, 2), orders)


def _order(worker: int, workers: int, micro_batches: int) -> tuple[Action, ...]:
    first, second = worker, 2 * workers - 1 - worker
    behind = workers - worker - 1
    steps = [
        *[("F", first)] * (2 * behind),
        *[("F", first), ("F", second)] * (worker + 1),
        *[("B", second), ("F", second)] * behind,
        *[("F", first), ("B", second), ("F", second), ("B", first)] * micro_batches,
    ]
    order = []
    weights: deque[Action] = deque()
    backwards_left = 2 * micro_batches
    for action in numbered(steps, micro_batches):
        kind, stage, micro_batch, _ = action
        if kind == "F":
            order.append(action)
            continue
        if backwards_left <= behind and weights:
            order.append(weights.popleft())
        drained = backwards_left <= workers
        if drained or (stage == second and micro_batch < behind):
            order.append(Action("I", stage, micro_batch))
            weights.append(Action("W", stage, micro_batch))
        else:
            order.append(action)
        if not drained:
            order.extend(weights)
            weights.clear()
        backwards_left -= 1
    return (*order, *weights)
