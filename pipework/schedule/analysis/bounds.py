"""A lower bound of the makespan of all schedules, within a limit of memory."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import floor, inf, isfinite
from typing import NamedTuple

from pipework.schedule.analysis.memory import SLACK, each_limit
from pipework.schedule.argument_checks import check_placement, checked_tuple, positive_integers
from pipework.schedule.costs import Costs, StageCosts, checked_without_skips


def lower_bound(
    placement: Sequence[int],
    micro_batches: int,
    costs: Costs | None = None,
    *,
    memory_limit: float | Sequence[float] | None = None,
    split: bool = True,
    inference: bool = False,
    recomputed: bool | Sequence[int] = False,
) -> float:
    """A makespan that no schedule beats: the time from the first start to the last end, over all workers.

    ::

        worker d   |   forwards only   |     anything     |  backwards only   |
                   ^                   ^                  ^                   ^
                   first forward       first backward     last forward ends   last backward ends

    Consider the stages of one worker, of which l is the lowest and h the highest, and m micro-batches. The first
    forward is of l; it starts no earlier than the fastest micro-batch arrives there. The first backward and the last
    forward are of h. So the first window is at least the time of a micro-batch from l to the loss and back to h. The
    last window is at least its time from h to the loss and back to the end of the pipe. Memory limits the work in both
    windows: at the end of the first one the worker holds all micro-batches whose forwards ran in it, and at the
    beginning of the last one all micro-batches whose backwards will run in it. The rest of each window is idle time, in
    addition to the work on m micro-batches:

    * makespan >= arrival at l + work + idle time of both windows. If memory holds everything, the windows may overlap,
      and only the longer idle time counts.
    * Instead of the last window: after the last backward of l, a micro-batch still goes upstream, while this worker
      runs its remaining weight halves, if backwards are split. Memory limits their number, too.
    * Memory x time: m times the memory of a micro-batch, multiplied by the shortest time for which it is held, is at
      most the limit times the worker's time. So that is >= m (a L + a' L' + ...) / limit, with activations a and
      times L of the stages.

    Each single stage is a smaller worker with the same limit, so all bounds hold for it, too; one of them is the
    time that one micro-batch takes through the whole pipe.

    Memory is counted as in :func:`simulate`, so with a schedule's ``peak_memory`` as limit its makespan is not
    below the bound, up to rounding. There need not be a schedule that reaches it.

    Source: the windows are those of 1F1B and zero-bubble schedules, arXiv 2401.10241; memory x time is the lifetime of
    building blocks, arXiv 2405.15362. The derivation is the one above.

    Args:
        placement: the worker of each stage.
        micro_batches: number of micro-batches m.
        costs: unit costs if None.
        memory_limit: the most memory that a worker's activations may hold, or a number for each worker; None: no limit.
            If all activations of a worker have one size, a limit is rounded down to a multiple of it.
        split: whether backwards may be split into ``I`` and ``W``; otherwise all are ``B``.
        inference: whether schedules have forwards only.
        recomputed: whether all micro-batches are recomputed, or the number of recomputed ones on each stage.

    Raises:
        TypeError: a number has a wrong type.
        ValueError: there is no stage, a number is out of range, a sequence has another length, recomputation is
            combined with inference, or a limit is too small for one micro-batch.

    Example:
        >>> from pipework.schedule import simulate, zb_h1
        >>> lower_bound(range(4), 8, memory_limit=4)
        27.0
        >>> simulate(zb_h1(4, 8)).makespan
        27.0
    """
    positive_integers(micro_batches=micro_batches)
    placement = checked_tuple("placement", placement, "(0, 1)")
    check_placement(placement)
    spread = checked_without_skips(costs).spread(len(placement))
    repeats = _repeats(recomputed, len(placement), micro_batches, inference=inference)
    limits = each_limit(memory_limit, 1 + max(placement))
    of_worker: dict[int, list[int]] = {}
    for stage, worker in enumerate(placement):
        of_worker.setdefault(worker, []).append(stage)
    for worker, stages in of_worker.items():
        _check_room(worker, stages, limits[worker], spread, repeats, inference=inference)
    pipe = _Pipe(placement, micro_batches, spread, repeats, split=split)
    return max(
        _forwards_alone(pipe, part) if inference else _of_part(pipe, part, limits[worker])
        for worker, stages in of_worker.items()
        for part in (stages, *([stage] for stage in stages))
    )


class _Item(NamedTuple):
    """Work on several micro-batches, and the memory that each of them holds until it is done."""

    memory: float
    time: float
    times: int


class _Pipe:
    """For each stage: times, memory, and when the fastest micro-batch comes by on its way to the loss and back."""

    def __init__(
        self, placement: Sequence[int], micro_batches: int, costs: StageCosts, repeats: Sequence[int], *, split: bool
    ) -> None:
        self.micro_batches, self.repeats, self.split = micro_batches, repeats, split
        self.forward, self.repeat = costs["forward"], costs["recompute"]
        backward, inputs, self.weights = (costs[name] for name in ("backward", "input_gradient", "weight_gradient"))
        # The shortest times to the gradient, and to the end of a backward, whether it is split or not.
        self.step, self.backward = backward, backward
        if split:
            self.step = tuple(map(min, backward, inputs))
            self.backward = tuple(min(b, i + w) for b, i, w in zip(backward, inputs, self.weights, strict=True))
        self.activation, self.checkpoint = costs["activation"], costs["checkpoint_activation"]
        self.waiting = costs["waiting"]
        # The least memory of a micro-batch once its backward has begun.
        self.late = tuple(map(min, costs["activation"], costs["waiting"])) if split else costs["activation"]
        self.inputs = inputs if split else backward
        # The least memory of a recomputed micro-batch.
        self.small = tuple(map(min, costs["activation"], costs["checkpoint_activation"]))
        self.large = tuple(map(max, costs["activation"], costs["checkpoint_activation"]))
        hops = [
            0.0 if one == other else time
            for one, other, time in zip(placement[:-1], placement[1:], costs["transfer"], strict=True)
        ]
        stages = len(placement)
        self.start = [0.0] * stages
        for stage in range(1, stages):
            self.start[stage] = self.start[stage - 1] + self.forward[stage - 1] + hops[stage - 1]
        self.end = [start + time for start, time in zip(self.start, self.forward, strict=True)]
        # Stages recompute while they wait for a gradient; only the last stage delays the others by it.
        loss = self.end[-1] + (self.repeat[-1] if repeats[-1] == micro_batches else 0.0)
        self.back = [loss] * stages
        for stage in range(stages - 2, -1, -1):
            self.back[stage] = self.back[stage + 1] + self.step[stage + 1] + hops[stage]
        self.done = [start + time for start, time in zip(self.back, self.backward, strict=True)]
        self.all_done = max(self.done)
        # The end of the last backward upstream of each stage.
        self.upstream = [0.0] * stages
        for stage in range(1, stages):
            self.upstream[stage] = max(self.upstream[stage - 1], self.done[stage - 1])

    def sizes(self, stages: Iterable[int]) -> set[float]:
        """The sizes of the pieces of memory that stages hold."""
        sizes = {self.activation[s] for s in stages} | {self.checkpoint[s] for s in stages if self.repeats[s]}
        return sizes | ({self.waiting[s] for s in stages} if self.split else set())

    def items(self, stages: Iterable[int], times: Sequence[float], held: Sequence[float]) -> list[_Item]:
        """Work on all micro-batches of some stages, including recomputation, with the least memory that they hold."""
        return [
            item
            for s in stages
            for item in (
                _Item(held[s], times[s], self.micro_batches - self.repeats[s]),
                _Item(min(held[s], self.small[s]), times[s] + self.repeat[s], self.repeats[s]),
            )
            if item.times
        ]

    def area(self, stage: int) -> float:
        """The memory x time of all micro-batches on a stage, from F to the end of W or B."""
        forward, backward, repeat = self.forward[stage], self.backward[stage], self.repeat[stage]
        wait = self.back[stage] - self.end[stage]
        activation = self.activation[stage]
        back = activation * backward
        if self.split:
            back = min(back, activation * self.inputs[stage] + self.late[stage] * self.weights[stage])
        whole = activation * (forward + wait) + back
        recomputed = (
            self.large[stage] * forward + self.small[stage] * max(0.0, wait - repeat) + activation * repeat + back
        )
        return (self.micro_batches - self.repeats[stage]) * whole + self.repeats[stage] * recomputed


def _of_part(pipe: _Pipe, stages: Sequence[int], limit: float) -> float:
    """The bound from some or all stages of one worker."""
    low, high, m = stages[0], stages[-1], pipe.micro_batches
    arrival = pipe.start[low]
    work = sum(
        m * (pipe.forward[stage] + pipe.backward[stage]) + pipe.repeats[stage] * pipe.repeat[stage] for stage in stages
    )
    forwards = pipe.items(stages, pipe.forward, pipe.activation)
    backwards = pipe.items(stages, pipe.backward, pipe.late)
    weights = [_Item(pipe.late[stage], pipe.weights[stage], m) for stage in stages] if pipe.split else []
    room = _whole_multiple(limit, pipe.sizes(stages))

    first = max(0.0, pipe.back[high] - arrival - _most(forwards, room))
    last = max(0.0, pipe.all_done - pipe.end[high] - _most(backwards, room))
    upstream = max(0.0, pipe.upstream[low] - pipe.back[low] - pipe.step[low])
    tail = max(0.0, upstream - _most(weights, room))
    if sum(memory * times for memory, _, times in forwards) > room * SLACK:  # a backward precedes the last forward
        idle = first + max(tail, last)
    else:
        idle = max(first + tail, last)
    window = sum(map(pipe.area, stages)) / room if room else 0.0
    return arrival + max(work + idle, window + (0.0 if pipe.split else upstream))


def _forwards_alone(pipe: _Pipe, stages: Sequence[int]) -> float:
    """The bound for inference, where memory delays no worker, because activations are freed after each forward."""
    low, high = stages[0], stages[-1]
    work = pipe.micro_batches * sum(pipe.forward[stage] for stage in stages)
    return pipe.start[low] + work + pipe.end[-1] - pipe.end[high]


def _most(items: Iterable[_Item], room: float) -> float:
    """The most time of work whose memory can all be held at once; fractions of micro-batches count.

    Example:
        >>> _most([_Item(memory=3, time=6, times=2), _Item(memory=2, time=5, times=2)], room=5.5)
        13.0
    """
    total = 0.0
    for memory, time, times in sorted(items, key=lambda item: item.time / item.memory if item.memory else inf)[::-1]:
        taken = times if memory * times <= room else room / memory
        total += taken * time
        room = max(0.0, room - taken * memory)
    return total


def _whole_multiple(limit: float, sizes: set[float]) -> float:
    """The part of the limit that pieces of these sizes can fill."""
    pieces = sizes - {0.0}
    if len(pieces) == 1:
        (size,) = pieces
        if isfinite(limit / size):
            return size * floor(limit / size * SLACK)
    return limit * SLACK


def _repeats(recomputed: bool | Sequence[int], stages: int, micro_batches: int, *, inference: bool) -> tuple[int, ...]:
    """The number of micro-batches that each stage recomputes."""
    repeats = (micro_batches * recomputed,) * stages if isinstance(recomputed, bool) else tuple(recomputed)
    most = 0 if inference else micro_batches
    if len(repeats) != stages or not all(type(repeat) is int and 0 <= repeat <= most for repeat in repeats):
        raise ValueError(
            f"recomputed is {recomputed!r}: wanted True, or for each of {stages} stages how many micro-batches "
            f"it recomputes, an integer from 0 to {most}"
        )
    return repeats


def _check_room(
    worker: int, stages: Sequence[int], limit: float, costs: StageCosts, repeats: Sequence[int], *, inference: bool
) -> None:
    """Refuse a limit that is too small for one micro-batch on the stages of a worker."""
    held = needed = 0.0
    for stage in stages:
        needed = max(needed, held + costs["activation"][stage])
        if not inference:  # the activations of its earlier forwards are still held
            least = min(costs["activation"][stage], costs["checkpoint_activation"][stage] if repeats[stage] else inf)
            held += least
    if needed > limit * SLACK:
        raise ValueError(
            f"memory_limit of worker {worker} is {limit:g}, but one micro-batch holds {needed:g} there, so no "
            f"schedule exists: raise the limit to {needed:g}, or place fewer stages on the worker"
        )
