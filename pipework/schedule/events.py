"""The event-driven run of a schedule: every worker starts its next action as soon as its data is there.

Validation asks it whether the schedule ends, simulation when. A worker that cannot go on is parked under the one
product it misses and woken when that is made, so the work is linear in the number of actions. Times do not depend on
which worker is looked at first: what a worker does, and what its channels carry, has a fixed order.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, NamedTuple

from pipework.schedule.action import Action
from pipework.schedule.channels import Channel, Post, channels
from pipework.schedule.costs import StageCosts
from pipework.schedule.edges import Message, crossings, message_of, recomputed, routes
from pipework.schedule.schedule import Schedule

LOSS: Final = Action("loss", 0)
"""The product that all actions but forwards need if the loss is computed outside of the pipe."""


class Stuck(NamedTuple):
    """A worker that waits for ever: for which action, and what that misses: a product, a receive, or the loss."""

    worker: int
    action: Action
    missing: Action


@dataclass(frozen=True)
class Run:
    """What happened.

    Attributes:
        times: (start, end) of each worker's actions, in its order; shorter than the order where the worker is stuck. Of
            a ``SEND`` or ``RECV`` those of the transfer; NaN if it never took place.
        stuck: the workers that wait for ever.
    """

    times: tuple[tuple[tuple[float, float], ...], ...]
    stuck: tuple[Stuck, ...]


_Times = list[float | None]
"""When a product of a stage is there, for each micro-batch; None: not yet."""

_NEVER: Final = (float("nan"), float("nan"))


class _Step(NamedTuple):
    """What a kind of action on a stage needs and makes.

    Attributes:
        duration: how long it takes.
        sources: what it needs, each with the time to come here, and its name.
        makes: where its end is noted; None if nobody needs it.
    """

    duration: float
    sources: tuple[tuple[_Times, float, Action], ...]
    makes: _Times | None


def run(schedule: Schedule, costs: StageCosts, *, loss_outside: bool = False, channel: Channel = "unbounded") -> Run:
    """Execute a schedule with given times.

    Args:
        schedule: each of its actions stands once, and transfers, if there are any, stand for all that crosses, behind
            what makes it and before what needs it; otherwise the order may be impossible.
        costs: times, spelt out for the schedule's stages and skips.
        loss_outside: no action but forwards starts before all forwards of all workers have ended.
        channel: what carries the transfers, if there are any; without, every value is simply there after its time.

    Example:
        >>> from pipework.schedule import Costs, fill_drain
        >>> run(fill_drain(2, 1), Costs().spread(stages=2)).times[0]
        ((0.0, 1.0), (4.0, 6.0))
    """
    table = _Table(schedule, costs, loss_outside=loss_outside)
    return _Execution(schedule, table, channel).whole()


class _Table:
    """What each kind of action needs and makes on each stage, looked up once instead of for every micro-batch."""

    def __init__(self, schedule: Schedule, costs: StageCosts, *, loss_outside: bool) -> None:
        stages, count = range(schedule.stages), schedule.micro_batches
        self.ends: dict[str, list[_Times]] = {kind: [[None] * count for _ in stages] for kind in "FRI"}
        self.loss: _Times = [None if loss_outside else 0.0] * count
        # To a micro-batch that is not recomputed, its recomputation is no obstacle.
        again = recomputed(schedule)
        for stage in stages:
            for micro_batch in range(count):
                if (stage, micro_batch) not in again:
                    self.ends["R"][stage][micro_batch] = 0.0
        self.arrivals: dict[tuple[str, int, int], _Times] = {}
        self.delays: dict[tuple[str, int, int], float] = {}
        explicit = schedule.communicates
        crossing = set(crossings(schedule))
        arriving: dict[tuple[str, int], list[tuple[_Times, float, Action]]] = {}
        for route in routes(schedule):
            kind, source, target, skip = route
            delay = 0.0
            if route in crossing:
                delay = costs.skip[skip] if skip >= 0 else costs.transfer[min(source, target)]
            product = "F" if kind == "F" else "I"
            entry = (self.ends[product][source], delay, Action(product, source))
            if explicit and route in crossing:
                self.delays[kind, source, target] = delay
                times: _Times = [None] * count
                self.arrivals[kind, source, target] = times
                entry = (times, 0.0, Action(f"RECV_{kind}", target, peer=source))
            arriving.setdefault((kind, target), []).append(entry)
        after_loss = [(self.loss, 0.0, LOSS)] if loss_outside else []
        self.steps: dict[str, list[_Step]] = {kind: [] for kind in "FRBIW"}
        for stage in stages:
            own = [(self.ends[kind][stage], 0.0, Action(kind, stage)) for kind in "FRI"]
            back = tuple(own[:2] + arriving.get(("B", stage), []) + after_loss)
            sources = {
                "F": tuple(arriving.get(("F", stage), [])),
                "R": tuple(own[:1] + after_loss),
                "B": back,
                "I": back,
                "W": tuple(own[2:]),
            }
            makes = {"F": "F", "R": "R", "B": "I", "I": "I"}
            for kind, steps in self.steps.items():
                made = self.ends[makes[kind]][stage] if kind in makes else None
                steps.append(_Step(costs.duration[kind][stage], sources[kind], made))
        self.reduction = costs.duration["REDUCE_GRAD"]


class _Execution:
    """The run under way."""

    def __init__(self, schedule: Schedule, table: _Table, channel: Channel) -> None:
        self._schedule = schedule
        self._table = table
        self._channels = channels(channel)
        self._times: list[list[tuple[float, float]]] = [[] for _ in schedule.orders]
        self._clocks = [0.0] * schedule.workers
        self._reductions = [0.0] * schedule.workers
        self._posted: dict[Message, list[tuple[int, int]]] = {}
        self._carried: dict[Message, tuple[float, float]] = {}
        self._parked: dict[tuple[int, int], list[tuple[int, Action]]] = {}
        self._awake = list(range(schedule.workers))[::-1]
        self._forwards = sum(action.kind == "F" for order in schedule.orders for action in order)
        self._last_forward = 0.0

    def whole(self) -> Run:
        """Runs until nobody can go on."""
        while self._awake:
            self._go_on(self._awake.pop())
        stuck = [
            Stuck(worker, self._schedule.orders[worker][len(self._times[worker])], missing)
            for (_, micro_batch), waiting in self._parked.items()
            for worker, name in waiting
            for missing in [name if name == LOSS else name._replace(micro_batch=micro_batch)]
        ]
        return Run(tuple(map(tuple, self._times)), tuple(sorted(stuck)))

    def _go_on(self, worker: int) -> None:
        order, times, table = self._schedule.orders[worker], self._times[worker], self._table
        steps, parked, clock = table.steps, self._parked, self._clocks[worker]
        for position in range(len(times), len(order)):
            kind, stage, micro_batch, _ = action = order[position]
            if kind not in steps:
                times.append((clock, clock))
                self._communicate(action, worker, position, clock)
                continue
            duration, sources, makes = steps[kind][stage]
            start = clock
            for source, delay, name in sources:
                arrival = source[micro_batch]
                if arrival is None:
                    parked.setdefault((id(source), micro_batch), []).append((worker, name))
                    self._clocks[worker] = clock
                    return
                if arrival + delay > start:
                    start = arrival + delay
            clock = start + duration
            times.append((start, clock))
            if makes is not None:
                makes[micro_batch] = clock
                if (id(makes), micro_batch) in parked:
                    self._wake(makes, micro_batch)
            if kind == "F":
                self._count_forward(clock)
        self._clocks[worker] = clock

    def _wake(self, made: _Times, micro_batch: int) -> None:
        self._awake.extend(worker for worker, _ in self._parked.pop((id(made), micro_batch), ()))

    def _count_forward(self, end: float) -> None:
        self._forwards -= 1
        self._last_forward = max(self._last_forward, end)
        if not self._forwards and self._table.loss[0] is None:
            loss = self._table.loss
            loss[:] = [self._last_forward] * len(loss)
            for micro_batch in range(len(loss)):
                self._wake(loss, micro_batch)

    def _communicate(self, action: Action, worker: int, position: int, clock: float) -> None:
        kind, stage, _, peer = action
        if kind == "REDUCE_GRAD":
            # One after the other, beside the computation.
            start = max(clock, self._reductions[worker])
            self._reductions[worker] = end = start + self._table.reduction[stage]
            self._times[worker][position] = (start, end)
        if peer < 0:
            return
        message = message_of(action)
        self._times[worker][position] = self._carried.get(message, _NEVER)
        self._posted.setdefault(message, []).append((worker, position))
        place = self._schedule.placement
        delay = self._table.delays[message[:3]]
        sender, receiver = place[message.source], place[message.target]
        for transfer in self._channels.post(Post(message, sender, receiver, delay, kind.startswith("SEND")), clock):
            self._arrive(*transfer)

    def _arrive(self, message: Message, start: float, end: float) -> None:
        arrivals = self._table.arrivals[message[:3]]
        arrivals[message.micro_batch] = end
        self._carried[message] = start, end
        for worker, position in self._posted[message]:
            self._times[worker][position] = (start, end)
        self._wake(arrivals, message.micro_batch)
