"""The event-driven run of a schedule: every worker starts its next action as soon as its data arrives.

Validation uses it to find deadlocks, simulation to get times, and the critical path to get causes. A worker that waits
for a product is woken when the product is made, so the work is linear in the number of actions. Times do not depend on
the order in which workers are visited, because the order of each worker's actions and transfers is fixed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, NamedTuple

from pipework.schedule.action import Action
from pipework.schedule.analysis.channels import Channel, Message, WorkerRoute, channels
from pipework.schedule.costs import StageCosts
from pipework.schedule.edges import Route, counterpart, crossings, recomputed, routes
from pipework.schedule.schedule import Schedule

LOSS: Final = Action("loss", 0)
"""The product that all actions except forwards need if the loss is computed outside of the pipe."""


class Deadlock(NamedTuple):
    """A worker that waits forever, the action at which it waits, and the missing product, receive, or loss."""

    worker: int
    action: Action
    missing: Action


@dataclass(frozen=True)
class Run:
    """The result of a run.

    Attributes:
        times: (start, end) of each worker's actions, in order; shorter than the order if the worker is in a deadlock.
            Those of a ``SEND`` or ``RECV`` are of the transfer, and NaN if it never took place.
        causes: for each of them, an encoded cause; :meth:`cause` decodes it.
        deadlocks: the workers that wait forever.
        routes: the routes between stages, by number.
        last_forward: the forward that ends last.
    """

    times: tuple[tuple[tuple[float, float], ...], ...]
    causes: tuple[tuple[Action | bool | Message | None, ...], ...]
    deadlocks: tuple[Deadlock, ...]
    routes: tuple[Route, ...]
    last_forward: Action

    def cause(self, action: Action, worker: int, position: int) -> Action | None:
        """The last thing that an action waited for.

        Returns:
            None for the computation before it in the order. Otherwise the name of a product (``I`` also for a ``B``), a
            ``RECV``, or a reduction. For a transfer: one of its own two sides, which stands for the computation before
            that side; or the ``SEND`` of the transfer before it.
        """
        found = self.causes[worker][position]
        if found is None:
            return None
        if isinstance(found, Action):
            if found.kind == "REDUCE_GRAD":
                return found
            return self.last_forward if found == LOSS else found._replace(micro_batch=action.micro_batch)
        if isinstance(found, bool):
            return action if found == action.kind.startswith("SEND") else counterpart(action)
        number, micro_batch = found
        return self.routes[number].send(micro_batch)


_Times = list[float | None]
"""When a product of a stage is made, for each micro-batch; None: not yet."""

_NEVER: Final = (float("nan"), float("nan"))


class _Source(NamedTuple):
    """A product that an action needs.

    Attributes:
        times: when it is made.
        delay: the time of its transfer.
        name: its name, without the micro-batch.
    """

    times: _Times
    delay: float
    name: Action


class _Step(NamedTuple):
    """A kind of action on a stage: its duration, inputs and product.

    Attributes:
        duration: its time.
        sources: the products that it needs.
        makes: the times of its product; None if no action needs it.
    """

    duration: float
    sources: tuple[_Source, ...]
    makes: _Times | None


def run(schedule: Schedule, costs: StageCosts, *, loss_outside: bool = False, channel: Channel = "unbounded") -> Run:
    """Execute a schedule with given times.

    Args:
        schedule: a schedule without violations of :func:`rules.broken`; it may have a deadlock.
        costs: times of each stage and skip.
        loss_outside: whether all forwards of all workers must end before any other action starts.
        channel: the transport of the schedule's transfers; if it has none, every value arrives after its transfer time.

    Example:
        >>> from pipework.schedule import Costs, fill_drain
        >>> run(fill_drain(2, 1), Costs().spread(stages=2)).times[0]
        ((0.0, 1.0), (4.0, 6.0))
    """
    return _Execution(schedule, _Table(schedule, costs, loss_outside=loss_outside), channel).finish()


class _Table:
    """Inputs and products of each kind of action on each stage, looked up once instead of for every micro-batch."""

    def __init__(self, schedule: Schedule, costs: StageCosts, *, loss_outside: bool) -> None:
        self._schedule, self._costs = schedule, costs
        count = schedule.micro_batches
        self._ends: dict[str, list[_Times]] = {kind: [[None] * count for _ in schedule.placement] for kind in "FRI"}
        # The recomputation of a micro-batch that has none counts as done.
        checkpointed = recomputed(schedule)
        for stage, times in enumerate(self._ends["R"]):
            times[:] = [None if (stage, micro_batch) in checkpointed else 0.0 for micro_batch in range(count)]
        self.loss: _Times = [None if loss_outside else 0.0] * count
        self._after_loss = (_Source(self.loss, 0.0, LOSS),) if loss_outside else ()
        self.routes = routes(schedule)
        self.arrivals: list[_Times] = []
        self.transfers: dict[tuple[str, int, int], tuple[WorkerRoute, bool]] = {}
        arriving = self._arriving()
        self.steps = {
            kind: [self._step(kind, stage, arriving) for stage in range(schedule.stages)] for kind in ("F", *"RBIW")
        }
        self.reduction = costs.duration["REDUCE_GRAD"]

    def _arriving(self) -> dict[tuple[str, int], list[_Source]]:
        """The products that each stage needs from others, forward and backward; records the routes of transfers."""
        schedule, costs = self._schedule, self._costs
        crossing = set(crossings(schedule))
        found: dict[tuple[str, int], list[_Source]] = {}
        for number, route in enumerate(self.routes):
            kind, source, target, skip = route
            product = "F" if kind == "F" else "I"
            delay = 0.0
            if route in crossing:
                delay = costs.skip[skip] if skip >= 0 else costs.transfer[min(source, target)]
            arrival = _Source(self._ends[product][source], delay, Action(product, source))
            times: _Times = [None] * schedule.micro_batches
            self.arrivals.append(times)
            if route in crossing and schedule.communicates:
                arrival = _Source(times, 0.0, Action(f"RECV_{kind}", target, peer=source))
                between = WorkerRoute(number, schedule.placement[source], schedule.placement[target], delay)
                self.transfers[f"SEND_{kind}", source, target] = between, True
                self.transfers[f"RECV_{kind}", target, source] = between, False
            found.setdefault((kind, target), []).append(arrival)
        return found

    def _step(self, kind: str, stage: int, arriving: dict[tuple[str, int], list[_Source]]) -> _Step:
        forward, again, inputs = (_Source(self._ends[own][stage], 0.0, Action(own, stage)) for own in "FRI")
        duration = self._costs.duration[kind][stage]
        if kind == "F":
            return _Step(duration, tuple(arriving.get(("F", stage), ())), forward.times)
        if kind == "R":
            return _Step(duration, (forward, *self._after_loss), again.times)
        if kind == "W":
            return _Step(duration, (inputs,), None)
        return _Step(duration, (forward, again, *arriving.get(("B", stage), ()), *self._after_loss), inputs.times)


class _Execution:
    """A run in progress."""

    def __init__(self, schedule: Schedule, table: _Table, channel: Channel) -> None:
        self._schedule = schedule
        self._table = table
        self._channels = channels(channel)
        self._times: list[list[tuple[float, float]]] = [[] for _ in schedule.orders]
        self._causes: list[list[Action | bool | Message | None]] = [[] for _ in schedule.orders]
        self._clocks = [0.0] * schedule.workers
        self._reductions: list[tuple[float, Action | None]] = [(0.0, None)] * schedule.workers
        self._posted: dict[Message, list[tuple[int, int]]] = {}
        self._carried: dict[Message, tuple[tuple[float, float], bool | Message]] = {}
        self._parked: dict[tuple[int, int], list[tuple[int, Action]]] = {}
        self._awake = list(range(schedule.workers))[::-1]
        self._forwards = sum(action.kind == "F" for order in schedule.orders for action in order)
        self._last_forward = (0.0, LOSS)

    def finish(self) -> Run:
        """Runs until no worker can continue."""
        while self._awake:
            self._continue(self._awake.pop())
        deadlocks = [
            Deadlock(worker, self._schedule.orders[worker][len(self._times[worker])], missing)
            for (_, micro_batch), waiting in self._parked.items()
            for worker, name in waiting
            for missing in [name if name == LOSS else name._replace(micro_batch=micro_batch)]
        ]
        times, causes = tuple(map(tuple, self._times)), tuple(map(tuple, self._causes))
        return Run(times, causes, tuple(sorted(deadlocks)), self._table.routes, self._last_forward[1])

    def _continue(self, worker: int) -> None:
        order, times, causes = self._schedule.orders[worker], self._times[worker], self._causes[worker]
        steps, parked, clock = self._table.steps, self._parked, self._clocks[worker]
        for position in range(len(times), len(order)):
            kind, stage, micro_batch, _ = action = order[position]
            if kind not in steps:
                times.append((clock, clock))
                causes.append(None)
                self._communicate(action, worker, position, clock)
                continue
            duration, sources, makes = steps[kind][stage]
            start = clock
            cause: Action | None = None
            for source, delay, name in sources:
                arrival = source[micro_batch]
                if arrival is None:
                    parked.setdefault((id(source), micro_batch), []).append((worker, name))
                    self._clocks[worker] = clock
                    return
                if arrival + delay > start:
                    start, cause = arrival + delay, name
            clock = start + duration
            times.append((start, clock))
            causes.append(cause)
            if makes is not None:
                makes[micro_batch] = clock
                if (id(makes), micro_batch) in parked:
                    self._wake(makes, micro_batch)
            if kind == "F":
                self._count_forward(action, clock)
        self._clocks[worker] = clock

    def _wake(self, made: _Times, micro_batch: int) -> None:
        self._awake.extend(worker for worker, _ in self._parked.pop((id(made), micro_batch), ()))

    def _count_forward(self, action: Action, end: float) -> None:
        self._forwards -= 1
        if end >= self._last_forward[0]:
            self._last_forward = end, action
        if not self._forwards and self._table.loss[0] is None:
            loss = self._table.loss
            loss[:] = [self._last_forward[0]] * len(loss)
            for micro_batch in range(len(loss)):
                self._wake(loss, micro_batch)

    def _communicate(self, action: Action, worker: int, position: int, clock: float) -> None:
        kind, stage, micro_batch, peer = action
        if peer >= 0:
            route, sends = self._table.transfers[kind, stage, peer]
            message = route.number, micro_batch
            self._times[worker][position], self._causes[worker][position] = self._carried.get(message, (_NEVER, None))
            self._posted.setdefault(message, []).append((worker, position))
            for transfer in self._channels.post(route, micro_batch, clock, sends=sends):
                self._arrive(*transfer)
        elif kind == "REDUCE_GRAD":
            # A worker runs its reductions one after the other, beside the computation.
            free, before = self._reductions[worker]
            start = max(clock, free)
            self._causes[worker][position] = before if free > clock else None
            self._reductions[worker] = start + self._table.reduction[stage], action
            self._times[worker][position] = start, start + self._table.reduction[stage]

    def _arrive(self, message: Message, start: float, end: float, cause: bool | Message) -> None:
        number, micro_batch = message
        arrivals = self._table.arrivals[number]
        arrivals[micro_batch] = end
        times = start, end
        self._carried[message] = times, cause
        for worker, position in self._posted[message]:
            self._times[worker][position] = times
            self._causes[worker][position] = cause
        if (id(arrivals), micro_batch) in self._parked:
            self._wake(arrivals, micro_batch)
