"""What each action of a schedule needs and makes, looked up once instead of for every micro-batch."""

from __future__ import annotations

from array import array
from math import nan
from typing import Final, NamedTuple

from pipework.schedule.action import KINDS, Action
from pipework.schedule.analysis.channels import WorkerRoute
from pipework.schedule.costs import StageCosts
from pipework.schedule.edges import crossings, routes
from pipework.schedule.schedule import Schedule

LOSS: Final = Action("loss", 0)
"""The product that all actions except forwards need if the loss is computed outside of the pipe."""


NOT_YET: Final = nan
"""The time of what has not been made."""


class Product:
    """What actions of one kind on one stage make.

    Attributes:
        name: its name, without the micro-batch.
        ends: when it is made, for each micro-batch.
        waiting: the workers that wait for it, by micro-batch.
    """

    __slots__ = ("ends", "name", "waiting")

    def __init__(self, name: Action, count: int, end: float) -> None:
        self.name = name
        self.ends = array("d", [end]) * count
        self.waiting: dict[int, list[int]] = {}


class Needed(NamedTuple):
    """A product that an action needs.

    Attributes:
        ends: when it is made.
        delay: the time of its transfer.
        product: the product.
    """

    ends: array[float]
    delay: float
    product: Product


class Computation(NamedTuple):
    """A kind of action on a stage: its duration, inputs and product.

    Attributes:
        duration: its time.
        sources: the products that it needs.
        ends: the times of its product; None if no action needs it.
        makes: its product.
    """

    duration: float
    sources: tuple[Needed, ...]
    ends: array[float] | None
    makes: Product | None


class Table:
    """Inputs and products of each kind of action on each stage, looked up once instead of for every micro-batch."""

    def __init__(self, schedule: Schedule, costs: StageCosts, *, loss_outside: bool) -> None:
        self.schedule, self._costs = schedule, costs
        count = schedule.micro_batches
        self._made = {
            kind: [Product(Action(kind, stage), count, NOT_YET) for stage in range(schedule.stages)] for kind in "FI"
        }
        self._again = self._recomputations()
        self.loss = Product(LOSS, count, NOT_YET if loss_outside else 0.0)
        self._after_loss = (Needed(self.loss.ends, 0.0, self.loss),) if loss_outside else ()
        self.routes = routes(schedule)
        self.arrivals: list[Product] = []
        self.transfers: dict[tuple[str, int, int], tuple[WorkerRoute, bool]] = {}
        arriving = self._arriving()
        # A kind without steps is no computation.
        self.steps: dict[str, list[Computation] | None] = dict.fromkeys(schedule.kinds)
        for kind in KINDS:
            self.steps[kind] = [self._step(kind, stage, arriving) for stage in range(schedule.stages)]
        self.reduction, self.gathering = costs.duration["REDUCE_GRAD"], costs.duration["UNSHARD"]

    def products(self) -> list[Product]:
        """All products."""
        return [*self._made["F"], *self._made["I"], *self._again.values(), *self.arrivals, self.loss]

    def _recomputations(self) -> dict[int, Product]:
        """The recomputations of each stage that has any; that of a micro-batch that has none counts as done."""
        found: dict[int, Product] = {}
        if "R" not in self.schedule.kinds:
            return found
        for order in self.schedule.orders:
            for kind, stage, micro_batch, _ in order:
                if kind == "R":
                    if stage not in found:
                        found[stage] = Product(Action("R", stage), self.schedule.micro_batches, 0.0)
                    found[stage].ends[micro_batch] = NOT_YET
        return found

    def _arriving(self) -> dict[tuple[str, int], list[Needed]]:
        """The products that each stage needs from others, forward and backward; records the routes of transfers."""
        schedule, costs = self.schedule, self._costs
        crossing = set(crossings(schedule))
        found: dict[tuple[str, int], list[Needed]] = {}
        for number, route in enumerate(self.routes):
            kind, source, target, skip = route
            delay = 0.0
            if route in crossing:
                delay = costs.skip[skip] if skip >= 0 else costs.transfer[min(source, target)]
            product = self._made["F" if kind == "F" else "I"][source]
            if route in crossing and schedule.communicates:
                product = Product(Action(f"RECV_{kind}", target, peer=source), schedule.micro_batches, NOT_YET)
                between = WorkerRoute(number, schedule.placement[source], schedule.placement[target], delay)
                self.transfers[f"SEND_{kind}", source, target] = between, True
                self.transfers[f"RECV_{kind}", target, source] = between, False
                delay = 0.0
            self.arrivals.append(product)
            found.setdefault((kind, target), []).append(Needed(product.ends, delay, product))
        return found

    def _step(self, kind: str, stage: int, arriving: dict[tuple[str, int], list[Needed]]) -> Computation:
        forward, inputs, again = self._made["F"][stage], self._made["I"][stage], self._again.get(stage)
        duration = self._costs.duration[kind][stage]
        own = (Needed(forward.ends, 0.0, forward),)
        if kind == "F":
            return Computation(duration, tuple(arriving.get(("F", stage), ())), forward.ends, forward)
        if kind == "R":
            return Computation(
                duration, (*own, *self._after_loss), *(None, None) if again is None else (again.ends, again)
            )
        if kind == "W":
            return Computation(duration, (Needed(inputs.ends, 0.0, inputs),), None, None)
        repeated = () if again is None else (Needed(again.ends, 0.0, again),)
        sources = (*own, *repeated, *arriving.get(("B", stage), ()), *self._after_loss)
        return Computation(duration, sources, inputs.ends, inputs)
