"""The event-driven run of a schedule: every worker starts its next action as soon as its data arrives.

Validation uses it to find deadlocks, simulation to get times, and the critical path to get causes. A worker that waits
for a product is woken when the product is made, so the work is linear in the number of actions. Times do not depend on
the order in which workers are visited, because the order of each worker's actions and transfers is fixed.

A schedule may have millions of actions, so the result has no object for each of them but arrays of times, from which
causes are found again when they are asked for.
"""

from __future__ import annotations

from array import array
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from math import isnan, nan
from typing import Final, NamedTuple

from pipework.schedule.action import Action
from pipework.schedule.analysis.channels import Channel, Message, WorkerRoute, channels
from pipework.schedule.costs import StageCosts, copy_time
from pipework.schedule.edges import awaited, counterpart, crossings, recomputed, routes
from pipework.schedule.kinds import ActionKind
from pipework.schedule.schedule import Schedule

LOSS: Final = Action("loss", 0)
"""The product that actions of the backward phase need if the loss is computed outside of the pipe."""

_NOT_YET: Final = nan  # the time of what has not been made


class Product:
    """What actions of one kind on one stage make.

    Attributes:
        name: its name, without the micro-batch.
        ends: when the product is made, for each micro-batch.
        waiting: the workers that wait for the product, by micro-batch.
    """

    __slots__ = ("ends", "name", "waiting")

    def __init__(self, name: Action, count: int, end: float) -> None:
        self.name = name
        self.ends = array("d", [end]) * count
        self.waiting: dict[int, list[int]] = {}


class Needed(NamedTuple):
    """A product that an action needs, and the time of its transfer."""

    product: Product
    delay: float = 0.0


class Computation(NamedTuple):
    """A kind of action on a stage: its duration, inputs and product.

    Attributes:
        duration: its time.
        sources: the products that it needs.
        makes: its product; None if no action needs it.
    """

    duration: float
    sources: tuple[Needed, ...]
    makes: Product | None


class Table:
    """Inputs and products of each kind of action on each stage, looked up once instead of for every micro-batch."""

    def __init__(self, schedule: Schedule, costs: StageCosts, *, loss_outside: bool) -> None:
        self.schedule, self.costs = schedule, costs
        count, stages = schedule.micro_batches, range(schedule.stages)
        rows = schedule.table
        of_all = (row for row in rows.values() if row.gives and not row.before)
        self._made = {
            (name, stage): Product(Action(name, stage), count, _NOT_YET)
            for name in {row.gives for row in of_all if row.always or row.letter in schedule.kinds}
            for stage in stages
        }
        self._optional = [row for row in rows.values() if row.before and row.letter in schedule.kinds]
        self._add_optional()
        self.loss = Product(LOSS, count, _NOT_YET if loss_outside else 0.0)
        self._after_loss = (Needed(self.loss),) if loss_outside else ()
        self.routes = routes(schedule)
        self.arrivals: list[Product] = []
        self.transfers: dict[tuple[str, int, int], tuple[WorkerRoute, bool]] = {}
        arriving = self._arriving()
        # Copies run beside the computation. Those of inputs that a micro-batch is recomputed from are smaller.
        self.copies = tuple(kind for kind in rows.letters(scope="copy") if kind in schedule.kinds)
        self.awaited = [awaited(order, rows) if self.copies else {} for order in schedule.orders]
        self.inputs = recomputed(schedule) if self.copies else frozenset()
        # Transfers, and actions on whole stages, have no steps here.
        self.steps: dict[str, list[Computation] | None] = {
            kind: [self._step(rows[kind], stage, arriving) for stage in stages]
            if rows[kind].scope in ("micro-batch", "copy")
            else None
            for kind in schedule.kinds
        }

    def time(self, row: ActionKind, stage: int) -> float:
        """The time of an action."""
        return self.costs[row.cost][stage] if row.cost else 0.0

    def products(self) -> list[Product]:
        """All products."""
        return [*self._made.values(), *self.arrivals, self.loss]

    def _add_optional(self) -> None:
        """Adds the products of kinds that not all micro-batches have, as if the others had them at once."""
        given = {row.letter: row.gives for row in self._optional}
        for order in self.schedule.orders if given else ():
            for kind, stage, micro_batch, _ in order:
                if kind in given:
                    name = given[kind]
                    if (name, stage) not in self._made:
                        self._made[name, stage] = Product(Action(name, stage), self.schedule.micro_batches, 0.0)
                    self._made[name, stage].ends[micro_batch] = _NOT_YET

    def _arriving(self) -> dict[tuple[str, int], list[Needed]]:
        """The products that each stage needs from others, forward and backward; records the routes of transfers."""
        schedule, costs = self.schedule, self.costs
        crossing = set(crossings(schedule))
        found: dict[tuple[str, int], list[Needed]] = {}
        for number, route in enumerate(self.routes):
            kind, source, target, skip = route
            delay = 0.0
            if route in crossing:
                delay = costs["skip_transfer"][skip] if skip >= 0 else costs["transfer"][min(source, target)]
            product = self._made[kind, source]
            if route in crossing and schedule.communicates:
                product = Product(Action(f"RECV_{kind}", target, peer=source), schedule.micro_batches, _NOT_YET)
                between = WorkerRoute(number, schedule.placement[source], schedule.placement[target], delay)
                self.transfers[f"SEND_{kind}", source, target] = between, True
                self.transfers[f"RECV_{kind}", target, source] = between, False
                delay = 0.0
            self.arrivals.append(product)
            found.setdefault((kind, target), []).append(Needed(product, delay))
        return found

    def _step(self, row: ActionKind, stage: int, arriving: dict[tuple[str, int], list[Needed]]) -> Computation:
        names = [*row.needs, *(other.gives for other in self._optional if row.letter in other.before)]
        own = [Needed(self._made[name, stage]) for name in names if (name, stage) in self._made]
        sources = own + arriving.get((row.arrives, stage), [])
        if row.phase == "backward":
            sources += self._after_loss
        return Computation(self.time(row, stage), tuple(sources), self._made.get((row.gives, stage)))


class Deadlock(NamedTuple):
    """A worker that waits forever, the action at which it waits, and the missing product, receive, or loss."""

    worker: int
    action: Action
    missing: Action


@dataclass(frozen=True, eq=False)
class Run:
    """The result of a run.

    Attributes:
        starts: the start of each worker's actions, in order; shorter than the order if the worker is in a deadlock.
            That of a ``SEND`` or ``RECV`` is of the transfer, and NaN if it never took place.
        ends: the end of each of them.
        deadlocks: the workers that wait forever.
        last_forward: the forward that ends last, if the loss is outside.
    """

    starts: Sequence[array[float]]
    ends: Sequence[array[float]]
    deadlocks: tuple[Deadlock, ...]
    last_forward: Action
    _table: Table = field(repr=False)
    _carried: Mapping[Message, tuple[float, float, bool | Message]] = field(repr=False)

    def cause(self, action: Action, worker: int, position: int) -> Action | None:
        """The last thing that an action waited for.

        Returns:
            None if that is the computation before the action in the order of its worker. Otherwise the name of a
            product (``1B0`` also for the product of ``1I0``), a ``RECV``, a reduction, or a copy to or from the host. A
            transfer waits for one of its two sides, the ``SEND`` or the ``RECV``, which is posted after the computation
            before it; or for the ``SEND`` of the transfer before it.
        """
        kind, stage, micro_batch, peer = action
        if peer >= 0:
            return self._cause_of_transfer(action)
        step = self._table.steps[kind]
        order, begin = self._table.schedule.orders[worker], self.starts[worker][position]
        if step is None or kind in self._table.copies:
            earlier = (n for n in range(position - 1, -1, -1) if order[n].kind == kind)
            before = next((order[n] for n in earlier if self.ends[worker][n] == begin > 0), None)
            if step is None or before is not None:
                return before
        start, cause = self._reached(worker, position)
        for product, delay in step[stage].sources:
            end = product.ends[micro_batch] + delay
            if end > start:
                start, cause = end, product.name
                cause = self.last_forward if cause == LOSS else cause._replace(micro_batch=micro_batch)
        return cause

    def _reached(self, worker: int, position: int) -> tuple[float, Action | None]:
        """When a worker comes to an action, and the copy for which it waited after the computation before."""
        order, ends, waits = self._table.schedule.orders[worker], self.ends[worker], self._table.awaited[worker]
        before = previous_computation(self._table.schedule, worker, position)
        time, cause = (0.0, None) if before is None else (ends[before], None)
        for n in range(0 if before is None else before + 1, position + 1):
            if n in waits and ends[waits[n]] > time:
                time, cause = ends[waits[n]], order[waits[n]]
        return time, cause

    def _cause_of_transfer(self, action: Action) -> Action | None:
        kind, stage, micro_batch, peer = action
        carried = self._carried.get((self._table.transfers[kind, stage, peer][0].number, micro_batch))
        if carried is None:
            return None
        cause = carried[2]
        if isinstance(cause, bool):
            return action if cause == kind.startswith("SEND") else counterpart(action)
        number, before = cause
        return self._table.routes[number].send(before)


def previous_computation(schedule: Schedule, worker: int, position: int) -> int | None:
    """The position of the last computation before a position of a worker's order."""
    order, table = schedule.orders[worker], schedule.table
    return next((n for n in range(position - 1, -1, -1) if table[order[n][0]].scope == "micro-batch"), None)


_NEVER: Final = (float("nan"), float("nan"), True)


def run(schedule: Schedule, costs: StageCosts, *, loss_outside: bool = False, channel: Channel = "unbounded") -> Run:
    """Execute a schedule with given times.

    Args:
        schedule: a schedule without violations of :func:`rules.broken`; it may have a deadlock.
        costs: times of each stage and skip.
        loss_outside: whether all forwards of all workers must end before any other action starts.
        channel: the transport of the schedule's transfers; if it has none, every value arrives after its transfer time.

    Example:
        >>> from pipework.schedule import Costs, fill_drain
        >>> [list(ends) for ends in run(fill_drain(2, 1), Costs().spread(stages=2)).ends]
        [[1.0, 6.0], [2.0, 4.0]]
    """
    return _Execution(schedule, Table(schedule, costs, loss_outside=loss_outside), channel).finish()


class _Execution:
    """A run in progress."""

    def __init__(self, schedule: Schedule, table: Table, channel: Channel) -> None:
        self._schedule = schedule
        self._table = table
        self._channels = channels(channel)
        self._starts = [array("d", [nan]) * len(order) for order in schedule.orders]
        self._ends = [array("d", [nan]) * len(order) for order in schedule.orders]
        self._unfinished = [iter(order) for order in schedule.orders]
        self._done = [0] * schedule.workers  # actions of each worker
        self._clocks = [0.0] * schedule.workers
        # When the last action of a worker and a kind that runs beside the computation ends.
        self._free: dict[tuple[int, str], float] = defaultdict(float)
        self._posted: dict[Message, list[tuple[int, int]]] = {}
        self._carried: dict[Message, tuple[float, float, bool | Message]] = {}
        self._awake = list(range(schedule.workers))[::-1]
        self._before_loss: tuple[str, ...] = ()
        self._forwards = 0
        if isnan(table.loss.ends[0]):
            ways = (schedule.table.letters(scope=scope, phase="forward") for scope in ("micro-batch", "copy"))
            self._before_loss = tuple(chain.from_iterable(ways))
            self._forwards = sum(action[0] in self._before_loss for order in schedule.orders for action in order)
        self._last_forward = (0.0, LOSS)

    def finish(self) -> Run:
        """Runs until no worker can continue."""
        self._run_all()
        deadlocks = {
            Deadlock(worker, self._schedule.orders[worker][self._done[worker]], missing)
            for product in self._table.products()
            for micro_batch, waiting in product.waiting.items()
            for worker in waiting
            for missing in [product.name if product.name == LOSS else product.name._replace(micro_batch=micro_batch)]
        }
        for worker, done in enumerate(self._done):
            del self._starts[worker][done:], self._ends[worker][done:]
        last = self._last_forward[1]
        return Run(self._starts, self._ends, tuple(sorted(deadlocks)), last, self._table, self._carried)

    def _run_all(self) -> None:
        """Runs workers, each up to an action whose data is missing."""
        steps, awake, copies = self._table.steps, self._awake, self._table.copies
        clocks, done, unfinished = self._clocks, self._done, self._unfinished
        waited_for: list[tuple[Action, ...]] = [()] * len(clocks)
        before_loss = self._before_loss
        while awake:
            worker = awake.pop()
            starts, ends = self._starts[worker], self._ends[worker]
            clock, position = clocks[worker], done[worker]
            for action in chain(waited_for[worker], unfinished[worker]):
                kind, stage, micro_batch, _ = action
                of_kind = steps[kind]
                if of_kind is None:
                    starts[position] = ends[position] = clock
                    clock = self._communicate(action, worker, position, clock)
                    position += 1
                    continue
                duration, sources, makes = of_kind[stage]
                start = clock
                for product, delay in sources:
                    arrival = product.ends[micro_batch]
                    if arrival != arrival:  # not yet, which is NaN
                        product.waiting.setdefault(micro_batch, []).append(worker)
                        waited_for[worker] = (action,)
                        break
                    arrival += delay
                    if arrival > start:
                        start = arrival
                else:
                    if kind in copies:
                        start, end, clock = self._copy(action, worker, position, clock, start)
                    else:
                        clock = end = start + duration
                    starts[position] = start
                    ends[position] = end
                    position += 1
                    if makes is not None:
                        makes.ends[micro_batch] = end
                        if makes.waiting and micro_batch in makes.waiting:
                            awake += makes.waiting.pop(micro_batch)
                    if kind in before_loss:
                        self._count_forward(action, clock)
                    continue
                break
            clocks[worker], done[worker] = clock, position

    def _wake(self, made: Product, micro_batch: int) -> None:
        self._awake.extend(made.waiting.pop(micro_batch, ()))

    def _count_forward(self, action: Action, end: float) -> None:
        self._forwards -= 1
        if end >= self._last_forward[0] and action[0] not in self._table.copies:
            self._last_forward = end, action
        if not self._forwards:
            loss = self._table.loss
            loss.ends[:] = array("d", [self._last_forward[0]]) * len(loss.ends)
            for micro_batch in range(len(loss.ends)):
                self._wake(loss, micro_batch)

    def _copy(
        self, action: Action, worker: int, position: int, clock: float, start: float
    ) -> tuple[float, float, float]:
        """Runs a copy, of which each worker has a channel each way; returns its times, and when the worker goes on."""
        kind, stage, micro_batch, _ = action
        earlier = self._table.awaited[worker].get(position)
        if earlier is not None:
            clock = max(clock, self._ends[worker][earlier])
        inputs = (stage, micro_batch) in self._table.inputs
        time = copy_time(self._table.costs, self._schedule.table[kind].cost, stage, inputs=inputs)
        start = max(start, clock, self._free[worker, kind])
        self._free[worker, kind] = end = start + time
        return start, end, clock

    def _communicate(self, action: Action, worker: int, position: int, clock: float) -> float:
        """Posts a transfer, or runs an action on a whole stage; returns when the worker goes on."""
        kind, stage, micro_batch, peer = action
        starts, ends = self._starts[worker], self._ends[worker]
        if peer >= 0:
            route, sends = self._table.transfers[kind, stage, peer]
            message = route.number, micro_batch
            starts[position], ends[position], _ = self._carried.get(message, _NEVER)
            self._posted.setdefault(message, []).append((worker, position))
            for transfer in self._channels.post(route, micro_batch, clock, sends=sends):
                self._arrive(*transfer)
            return clock
        row = self._schedule.table[kind]
        time = self._table.time(row, stage)
        if not row.beside:
            ends[position] = clock + time
            return ends[position]
        # A worker runs its reductions one after the other, beside the computation.
        starts[position] = max(clock, self._free[worker, kind])
        self._free[worker, kind] = ends[position] = starts[position] + time
        return clock

    def _arrive(self, message: Message, start: float, end: float, cause: bool | Message) -> None:
        number, micro_batch = message
        arrived = self._table.arrivals[number]
        arrived.ends[micro_batch] = end
        self._carried[message] = start, end, cause
        for worker, position in self._posted[message]:
            self._starts[worker][position] = start
            self._ends[worker][position] = end
        self._wake(arrived, micro_batch)
