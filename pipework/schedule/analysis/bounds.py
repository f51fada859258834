"""Lower bounds: times that no schedule beats, whatever its orders, within a limit of memory."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import floor, inf, isfinite
from typing import NamedTuple

from pipework.schedule.analysis.memory import SLACK, each_limit
from pipework.schedule.checks import check_placement, checked_tuple, positive_integer
from pipework.schedule.costs import Costs, StageCosts, checked


@dataclass(frozen=True)
class Bounds:
    """Times that no schedule beats.

    Attributes:
        makespan: from the start of the first action to the end of the last, over all workers.
        span: the longest busy window of a worker.
    """

    makespan: float
    span: float


def lower_bounds(
    placement: Sequence[int],
    micro_batches: int,
    costs: Costs | None = None,
    *,
    memory_limit: float | Sequence[float] | None = None,
    split: bool = True,
    inference: bool = False,
    recomputed: bool | Sequence[int] = False,
) -> Bounds:
    """Say what time every schedule takes at least.

    ::

        worker d   |   forwards only   |     anything     |  backwards only   |
                   ^                   ^                  ^                   ^
                   first forward       first backward     last forward ends   last backward ends

    Look at the stages of one worker, l the lowest and h the highest of them, and m micro-batches. The first forward is
    one of l, and no sooner than the fastest trip of a micro-batch through the pipe comes there. The first backward and
    the last forward are of h. So the first window is not shorter than the trip from l to the loss and back to h, and
    the last not than that from h to the loss and back to the end of the pipe. But what is done in the first is limited
    by memory, since every forward in it is still held at its end, and what is done in the last, too, since it was all
    held at its beginning. What a window is longer than its work, the worker idles, in addition to its work on m
    micro-batches:

    * makespan >= arrival at l + work + idle time of both windows. If memory holds everything, the windows may overlap,
      and only the longer idle time counts.
    * In place of the last window, what follows the last backward of l: a trip upstream from there, while this worker
      runs the weight halves that are left, if backwards are split. They are limited by memory, too.
    * Memory x time: m times what a micro-batch holds, multiplied by the shortest time in which it can, fits into the
      limit times the busy window. So window >= m (a L + a' L' + ...) / limit, of activations a and times L of stages.

    Each stage by itself is a smaller worker with the same limit, so all that holds for it, too; that gives the trip of
    one micro-batch, among others. The same without arrival and trips of others bounds the busy windows.

    Memory is counted as :func:`simulate` does, so with a schedule's ``peak_memory`` as limit its times are not below
    the bounds (but for rounding). The bounds need not be reached by any schedule.

    Source: the windows are those of 1F1B and zero-bubble schedules, arXiv 2401.10241; memory x time is the lifetime of
    building blocks, arXiv 2405.15362. The derivation is the one above.

    Args:
        placement: the worker of each stage.
        micro_batches: number of micro-batches m.
        costs: unit costs if None.
        memory_limit: how much a worker's activations may hold, or a sequence with one number for each worker; None:
            any amount. Where all activations of a worker are alike, a limit counts as the multiple below it.
        split: whether a backward may be ``I`` and ``W``; any of them may still be ``B``. If not, all are ``B``.
        inference: whether nothing goes back, so that there are forwards only.
        recomputed: whether each micro-batch is recomputed on each stage, or how many are on each stage.

    Raises:
        TypeError: a number of a wrong type.
        ValueError: no stage, a number out of range, a sequence of another length, recomputation in inference, or a
            limit within which there is no schedule since it cannot hold one micro-batch.

    Example:
        >>> from pipework.schedule import simulate, zb_h1
        >>> lower_bounds(range(4), 8, memory_limit=4)
        Bounds(makespan=27.0, span=27.0)
        >>> simulate(zb_h1(4, 8)).makespan
        27.0
    """
    positive_integer("micro_batches", micro_batches)
    placement = checked_tuple("placement", placement, "(0, 1)")
    check_placement(placement)
    spread = checked(costs).spread(len(placement))
    repeats = _repeats(recomputed, len(placement), micro_batches, inference=inference)
    limits = each_limit(memory_limit, 1 + max(placement))
    of_worker: dict[int, list[int]] = {}
    for stage, worker in enumerate(placement):
        of_worker.setdefault(worker, []).append(stage)
    for worker, stages in of_worker.items():
        _check_room(worker, stages, limits[worker], spread, repeats, inference=inference)
    pipe = _Pipe(placement, micro_batches, spread, repeats, split=split)
    bounds = [
        _forwards_alone(pipe, part) if inference else _of_part(pipe, part, limits[worker])
        for worker, stages in of_worker.items()
        for part in (stages, *([stage] for stage in stages))
    ]
    return Bounds(max(each.makespan for each in bounds), max(each.span for each in bounds))


class _Item(NamedTuple):
    """Work on several micro-batches, and the memory that each of them holds while it is not done."""

    memory: float
    time: float
    times: int


class _Pipe:
    """What the bounds are made of: of each stage, times, memory and the fastest trip of a micro-batch."""

    def __init__(
        self, placement: Sequence[int], micro_batches: int, costs: StageCosts, repeats: Sequence[int], *, split: bool
    ) -> None:
        self.micro_batches, self.repeats, self.split = micro_batches, repeats, split
        self.forward, self.repeat = costs.duration["F"], costs.duration["R"]
        backward, inputs, self.weights = (costs.duration[kind] for kind in "BIW")
        # The fastest way to the gradient, and to the end of a backward: whoever may split need not.
        self.step, self.backward = backward, backward
        if split:
            self.step = tuple(map(min, backward, inputs))
            self.backward = tuple(min(b, i + w) for b, i, w in zip(backward, inputs, self.weights, strict=True))
        self.activation, self.checkpoint, self.waiting = costs.activation, costs.checkpoint_activation, costs.waiting
        # What a micro-batch holds at the least once its backward has begun.
        self.late = tuple(map(min, costs.activation, costs.waiting)) if split else costs.activation
        self.inputs = inputs if split else backward
        # What a recomputed micro-batch holds at the least.
        self.small = tuple(map(min, costs.activation, costs.checkpoint_activation))
        self.large = tuple(map(max, costs.activation, costs.checkpoint_activation))
        hops = [
            0.0 if one == other else time
            for one, other, time in zip(placement[:-1], placement[1:], costs.transfer, strict=True)
        ]
        stages = len(placement)
        self.start = [0.0] * stages
        for stage in range(1, stages):
            self.start[stage] = self.start[stage - 1] + self.forward[stage - 1] + hops[stage - 1]
        self.end = [start + time for start, time in zip(self.start, self.forward, strict=True)]
        # Stages recompute while they wait for a gradient; only that of the last stage is in everybody's way.
        loss = self.end[-1] + (self.repeat[-1] if repeats[-1] == micro_batches else 0.0)
        self.back = [loss] * stages
        for stage in range(stages - 2, -1, -1):
            self.back[stage] = self.back[stage + 1] + self.step[stage + 1] + hops[stage]
        self.done = [start + time for start, time in zip(self.back, self.backward, strict=True)]
        self.all_done = max(self.done)
        # What comes last upstream of each stage.
        self.upstream = [0.0] * stages
        for stage in range(1, stages):
            self.upstream[stage] = max(self.upstream[stage - 1], self.done[stage - 1])

    def sizes(self, stages: Iterable[int]) -> set[float]:
        """The pieces in which stages ever hold memory."""
        sizes = {self.activation[s] for s in stages} | {self.checkpoint[s] for s in stages if self.repeats[s]}
        return sizes | ({self.waiting[s] for s in stages} if self.split else set())

    def items(self, stages: Iterable[int], times: Sequence[float], held: Sequence[float]) -> list[_Item]:
        """Work on all micro-batches of some stages, with the least that they hold; recomputation is work as well."""
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
        """Memory x time that all micro-batches need on a stage, from F to the end of W or B."""
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


def _of_part(pipe: _Pipe, stages: Sequence[int], limit: float) -> Bounds:
    """The bounds from some or all stages of one worker."""
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
    in_last = _most(backwards, room)
    last = max(0.0, pipe.all_done - pipe.end[high] - in_last)
    own_last = max(0.0, max(pipe.done[stage] for stage in stages) - pipe.end[high] - in_last)
    upstream = max(0.0, pipe.upstream[low] - pipe.back[low] - pipe.step[low])
    tail = max(0.0, upstream - _most(weights, room))
    if sum(memory * times for memory, _, times in forwards) > room * SLACK:  # a backward precedes the last forward
        idle, own_idle = first + max(tail, last), first + own_last
    else:
        idle, own_idle = max(first + tail, last), max(first, own_last)

    window = sum(map(pipe.area, stages)) / room if room else 0.0
    return Bounds(
        arrival + max(work + idle, window + (0.0 if pipe.split else upstream)),
        max(work + own_idle, window, max(pipe.done[stage] for stage in stages) - arrival),
    )


def _forwards_alone(pipe: _Pipe, stages: Sequence[int]) -> Bounds:
    """The same for inference, where memory delays nobody: activations do not outlive a forward."""
    low, high = stages[0], stages[-1]
    work = pipe.micro_batches * sum(pipe.forward[stage] for stage in stages)
    return Bounds(
        pipe.start[low] + work + pipe.end[-1] - pipe.end[high],
        max(work, pipe.end[high] - pipe.start[low]),
    )


def _most(items: Iterable[_Item], room: float) -> float:
    """The most time that work can take of which all memory is held at once; parts of micro-batches count, too.

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
    """How much of the limit can be used by memory that comes in pieces of these sizes."""
    pieces = sizes - {0.0}
    if len(pieces) == 1:
        (size,) = pieces
        if isfinite(limit / size):
            return size * floor(limit / size * SLACK)
    return limit * SLACK


def _repeats(recomputed: bool | Sequence[int], stages: int, micro_batches: int, *, inference: bool) -> tuple[int, ...]:
    """How many micro-batches each stage recomputes."""
    repeats = (micro_batches * recomputed,) * stages if isinstance(recomputed, bool) else tuple(recomputed)
    if len(repeats) != stages:
        raise ValueError(
            f"recomputed has {len(repeats)} number{'s' if len(repeats) != 1 else ''}: wanted {stages}, "
            "one for each stage, or True for all micro-batches"
        )
    for stage, repeat in enumerate(repeats):
        if type(repeat) is not int or not 0 <= repeat <= micro_batches:
            raise ValueError(
                f"recomputed of stage {stage} is {repeat!r}: wanted how many of the {micro_batches} micro-batches "
                f"are recomputed there, an integer from 0 to {micro_batches}"
            )
    if inference and any(repeats):
        raise ValueError("recomputed is set for inference, where nothing goes back: leave one of the two out")
    return repeats


def _check_room(
    worker: int, stages: Sequence[int], limit: float, costs: StageCosts, repeats: Sequence[int], *, inference: bool
) -> None:
    """Refuse a limit with which no micro-batch gets through the stages of a worker."""
    held = needed = 0.0
    for stage in stages:
        needed = max(needed, held + costs.activation[stage])
        if not inference:  # what its earlier forwards made is still there
            least = min(costs.activation[stage], costs.checkpoint_activation[stage] if repeats[stage] else inf)
            held += least
    if needed > limit * SLACK:
        raise ValueError(
            f"memory_limit of worker {worker} is {limit:g}, but one micro-batch holds {needed:g} there: there is no "
            f"schedule; raise the limit to {needed:g}, or place fewer stages on the worker"
        )
