"""A schedule: the order of actions of each worker, as immutable data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from pipework.schedule.checks import check_order, check_placement, check_skips, checked_skips, checked_tuple

if TYPE_CHECKING:
    from pipework.schedule.action import Action
    from pipework.schedule.analysis.channels import Channel
    from pipework.schedule.analysis.simulate import Simulation
    from pipework.schedule.analysis.validate import Validation
    from pipework.schedule.costs import Costs
    from pipework.schedule.draw.svg import Colors, Labels
    from pipework.schedule.formats.csv_form import Form


@dataclass(frozen=True)
class Schedule:
    """What every worker does, in which order.

    The constructor checks types and ranges, so that every later function may rely on them; whether the orders can be
    executed is the question of :meth:`validate`.

    Attributes:
        name: what people call it, such as ``"gpipe"``.
        placement: the worker of each stage.
        orders: the actions of each worker, in the order in which it runs them.
        inference: whether nothing goes back, so that there are forwards only.
        skips: the skip connections that pass over a stage, as (from, to) pairs of stages; see
            :func:`pipework.schedule.with_skips`.

    Raises:
        TypeError: a name, worker, stage or micro-batch of a wrong type.
        ValueError: no stage, no worker, no action, or a number out of range.

    Example:
        >>> from pipework.schedule import Action
        >>> one = Schedule("tiny", placement=(0,), orders=((Action("F", 0, 0), Action("B", 0, 0)),))
        >>> one.workers, one.stages, one.micro_batches
        (1, 1, 1)
    """

    name: str
    placement: tuple[int, ...]
    orders: tuple[tuple[Action, ...], ...]
    inference: bool = False
    skips: tuple[tuple[int, int], ...] = ()

    def __post_init__(self) -> None:
        if not isinstance(self.name, str):
            raise TypeError(f"name of a schedule is {self.name!r}: wanted a str such as 'gpipe'")
        # Lists are welcome, but what is kept is hashable.
        orders = checked_tuple("orders", self.orders, "an order of actions for each worker")
        example = "(Action('F', 0, 0), Action('B', 0, 0))"
        orders = tuple(checked_tuple(f"the order of worker {n}", order, example) for n, order in enumerate(orders))
        object.__setattr__(self, "placement", checked_tuple("placement", self.placement, "(0, 1)"))
        object.__setattr__(self, "orders", orders)
        object.__setattr__(self, "skips", checked_skips(self.skips))
        if not orders:
            raise ValueError("orders is empty: give one order of actions for each worker")
        check_placement(self.placement, len(orders))
        check_skips(self.skips, len(self.placement))
        for worker, order in enumerate(orders):
            check_order(worker, order, len(self.placement), inference=self.inference)
        if all(action[2] < 0 for order in self.orders for action in order):
            raise ValueError("the schedule has no action at all: give every worker its actions in `orders`")

    def __repr__(self) -> str:
        return f"Schedule({self.name!r}, {self._size})"

    @property
    def workers(self) -> int:
        """How many workers there are."""
        return len(self.orders)

    @property
    def stages(self) -> int:
        """How many stages there are, over all workers."""
        return len(self.placement)

    @cached_property
    def micro_batches(self) -> int:
        """How many micro-batches there are, one more than the highest number that occurs."""
        return 1 + max(action[2] for order in self.orders for action in order)

    @cached_property
    def communicates(self) -> bool:
        """Whether transfers between workers stand among the actions, as :func:`with_communication` adds them."""
        return any(action[3] >= 0 for order in self.orders for action in order)

    @cached_property
    def split_stages(self) -> frozenset[int]:
        """The stages of which some backward comes in halves."""
        return frozenset(action.stage for order in self.orders for action in order if action.kind == "I")

    @property
    def title(self) -> str:
        """Name and size, for people.

        Example:
            >>> from pipework.schedule import fill_drain
            >>> fill_drain(4, 1).title
            'gpipe, 4 workers, 1 micro-batch'
        """
        return f"{self.name}, {self._size}"

    @property
    def _size(self) -> str:
        workers = f"{self.workers} worker{'s' if self.workers > 1 else ''}"
        return f"{workers}, {self.micro_batches} micro-batch{'es' if self.micro_batches > 1 else ''}"

    def stages_of(self, worker: int) -> tuple[int, ...]:
        """The stages that a worker holds, in ascending order.

        Raises:
            ValueError: there is no such worker.

        Example:
            >>> from pipework.schedule import fill_drain
            >>> fill_drain(4, 8).stages_of(2)
            (2,)
        """
        if not 0 <= worker < self.workers:
            raise ValueError(f"worker is {worker}, but this schedule has the workers 0 to {self.workers - 1}")
        return tuple(stage for stage, holder in enumerate(self.placement) if holder == worker)

    def validate(
        self,
        costs: Costs | None = None,
        *,
        loss_outside: bool = False,
        channel: Channel = "unbounded",
        memory_limit: float | Sequence[float] | None = None,
    ) -> Validation:
        """Say whether this schedule can be executed, and if not, why; see :func:`pipework.schedule.validate`."""
        from pipework.schedule.analysis.validate import validate

        return validate(self, costs, loss_outside=loss_outside, channel=channel, memory_limit=memory_limit)

    def simulate(
        self,
        costs: Costs | None = None,
        *,
        loss_outside: bool = False,
        channel: Channel = "unbounded",
        memory_limit: float | Sequence[float] | None = None,
    ) -> Simulation:
        """Predict times and memory; see :func:`pipework.schedule.simulate`."""
        from pipework.schedule.analysis.simulate import simulate

        return simulate(self, costs, loss_outside=loss_outside, channel=channel, memory_limit=memory_limit)

    def to_text(self, costs: Costs | None = None, *, max_width: int = 160) -> str:
        """Draw the predicted timeline for a terminal; see :func:`pipework.schedule.grid`.

        Example:
            >>> from pipework.schedule import Costs, fill_drain
            >>> print(fill_drain(2, 2).to_text(Costs(backward=1)))
            worker 0  0F0 0F1  .   .  0B0 0B1
            worker 1   .  1F0 1F1 1B0 1B1  .
        """
        from pipework.schedule.draw.grid import grid

        return grid(self.simulate(costs).timeline, max_width=max_width)

    def to_svg(
        self,
        costs: Costs | None = None,
        *,
        colors: Colors = "action",
        update: bool = False,
        labels: Labels | None = None,
    ) -> str:
        """Draw the predicted timeline as an SVG picture; see :func:`pipework.schedule.svg`."""
        from pipework.schedule.draw.svg import svg

        return svg(self.simulate(costs).timeline, colors=colors, update=update, labels=labels)

    def to_orders_text(self) -> str:
        """Write name, placement and orders as text that :meth:`from_orders_text` reads back.

        Example:
            >>> from pipework.schedule import fill_drain
            >>> print(fill_drain(2, 1).to_orders_text())
            schedule gpipe
            placement 0 1
            worker 0 0F0 0B0
            worker 1 1F0 1B0
        """
        from pipework.schedule.formats.orders_text import to_orders_text

        return to_orders_text(self)

    @staticmethod
    def from_orders_text(text: str) -> Schedule:
        """Read what :meth:`to_orders_text` wrote.

        Raises:
            ValueError: a line is not understood; it is named with its number.

        Example:
            >>> from pipework.schedule import fill_drain
            >>> Schedule.from_orders_text(fill_drain(3, 5).to_orders_text()) == fill_drain(3, 5)
            True
        """
        from pipework.schedule.formats.orders_text import from_orders_text

        return from_orders_text(text)

    def to_csv(self, *, form: Form = "compute_only") -> str:
        """Write the orders for `torch.distributed.pipelining`, which loads them with `_load_csv`.

        Args:
            form: ``"compute_only"``: forwards and backwards. ``"compute_comms"``: with transfers and reductions of
                gradients as well, which are added unless they are there.

        Returns:
            A row for each worker, a cell for each action. Name and skips are not part of it.

        Raises:
            ValueError: the schedule has actions for which PyTorch, or the form, has no word.

        Example:
            >>> from pipework.schedule import fill_drain
            >>> print(fill_drain(2, 1).to_csv(form="compute_comms"))
            0F0,0SEND_F0,0RECV_B0,0B0,0REDUCE_GRAD
            1RECV_F0,1F0,1B0,1SEND_B0,1REDUCE_GRAD
            <BLANKLINE>
        """
        from pipework.schedule.formats.csv_form import to_csv

        return to_csv(self, form=form)

    @staticmethod
    def from_csv(text: str, *, name: str = "csv") -> Schedule:
        """Read what :meth:`to_csv` or `torch.distributed.pipelining` wrote, in either form.

        A forward and a backward side by side (``OVERLAP_F_B``) become one after the other, as PyTorch runs them.

        Args:
            text: the CSV itself.
            name: what to call the schedule.

        Raises:
            ValueError: a cell that is no action, a row without one, a stage in two rows, or one in none; the message
                says where. Whether the schedule can be executed, :meth:`validate` tells.

        Example:
            >>> Schedule.from_csv("0F0,0B0").validate().ok
            True
        """
        from pipework.schedule.formats.csv_form import from_csv

        return from_csv(text, name=name)

    def to_json(self) -> str:
        """Write everything that the schedule is, as JSON that :meth:`from_json` reads back."""
        from pipework.schedule.formats.json_form import to_json

        return to_json(self)

    @staticmethod
    def from_json(text: str) -> Schedule:
        """Read what :meth:`to_json` wrote.

        Raises:
            ValueError: no JSON, or none of a schedule.

        Example:
            >>> from pipework.schedule import zb_v
            >>> Schedule.from_json(zb_v(2, 3).to_json()) == zb_v(2, 3)
            True
        """
        from pipework.schedule.formats.json_form import from_json

        return from_json(text)

    def _repr_svg_(self) -> str | None:
        # A notebook asks for the picture of whatever stands last in a cell, of an invalid schedule too; None makes it
        # fall back to the text form, which is what one needs to see then.
        return self.to_svg() if self.validate().ok else None


def checked_schedule(schedule: Schedule) -> Schedule:
    """The schedule itself.

    Raises:
        TypeError: it is something else, such as a name.

    Example:
        >>> checked_schedule("1f1b")
        Traceback (most recent call last):
        TypeError: schedule is '1f1b': wanted a Schedule, such as build('1f1b', workers=4, chunks=8)
    """
    if not isinstance(schedule, Schedule):
        raise TypeError(f"schedule is {schedule!r}: wanted a Schedule, such as build('1f1b', workers=4, chunks=8)")
    return schedule
