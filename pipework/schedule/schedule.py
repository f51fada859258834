"""A schedule: the order of actions of each worker, as immutable data; and its parts."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from operator import itemgetter

from pipework.schedule.action import Action
from pipework.schedule.argument_checks import check_order, check_placement, checked_skips, checked_tuple
from pipework.schedule.draw.units import counted
from pipework.schedule.kinds import KINDS, Kinds

Orders = tuple[tuple[Action, ...], ...]
"""The actions of each worker, as in :attr:`Schedule.orders`."""


@dataclass(frozen=True)
class Schedule:
    """The actions of every worker, in order.

    The constructor checks types and ranges, so that all functions can rely on them. Whether the orders can be executed
    is checked by :func:`pipework.schedule.validate`.

    Attributes:
        name: such as ``"gpipe"``.
        placement: the worker of each stage.
        orders: the actions of each worker, in the order in which it runs them.
        inference: whether the schedule has forwards only.
        skips: the skip connections that pass over a stage, as (from, to) pairs of stages; see
            :func:`pipework.schedule.with_skips`.
        table: the kinds of actions that there are.

    Raises:
        TypeError: a name, worker, stage or micro-batch has a wrong type.
        ValueError: there is no stage, worker or action, or a number is out of range.

    Example:
        >>> from pipework.schedule import Action
        >>> one = Schedule("tiny", placement=(0,), orders=((Action("F", 0, 0), Action("B", 0, 0)),))
        >>> one.workers, one.stages, one.micro_batches
        (1, 1, 1)
    """

    name: str
    placement: tuple[int, ...]
    orders: Orders
    inference: bool = False
    skips: tuple[tuple[int, int], ...] = ()
    table: Kinds = KINDS

    def __post_init__(self) -> None:
        if not isinstance(self.name, str):
            raise TypeError(f"name of a schedule is {self.name!r}: wanted a str such as 'gpipe'")
        # Lists are accepted; tuples are stored, so that a schedule is hashable.
        orders = checked_tuple("orders", self.orders, "an order of actions for each worker")
        example = "(Action('F', 0, 0), Action('B', 0, 0))"
        orders = tuple(checked_tuple(f"the order of worker {n}", order, example) for n, order in enumerate(orders))
        object.__setattr__(self, "placement", checked_tuple("placement", self.placement, "(0, 1)"))
        object.__setattr__(self, "orders", orders)
        object.__setattr__(self, "skips", checked_skips(self.skips))
        check_placement(self.placement, len(orders))
        for source, target in self.skips:
            if not 0 <= source < target - 1 < self.stages - 1 or self.skips.count((source, target)) > 1:
                raise ValueError(
                    f"a skip goes from stage {source} to stage {target}: wanted each pair once, over at least one of "
                    f"the stages 0 to {self.stages - 1}; with_skips() leaves the others out"
                )
        for worker, order in enumerate(orders):
            check_order(worker, order, self.stages, self.table, inference=self.inference)
        if all(action[2] < 0 for order in self.orders for action in order):
            raise ValueError("the schedule has no action at all: give every worker its actions in `orders`")

    def __repr__(self) -> str:
        return f"Schedule({self.name!r}, {self._size})"

    @property
    def workers(self) -> int:
        """Number of workers."""
        return len(self.orders)

    @property
    def stages(self) -> int:
        """Number of stages, over all workers."""
        return len(self.placement)

    @cached_property
    def micro_batches(self) -> int:
        """Number of micro-batches: one more than the highest one in the orders."""
        highest: int = max(map(itemgetter(2), chain.from_iterable(self.orders)))
        return 1 + highest

    @cached_property
    def kinds(self) -> frozenset[str]:
        """The kinds of actions that occur."""
        return frozenset(map(itemgetter(0), chain.from_iterable(self.orders)))

    @cached_property
    def communicates(self) -> bool:
        """Whether the orders contain transfers, as :func:`with_communication` adds them."""
        return not self.kinds.isdisjoint(self.table.letters(scope="transfer"))

    @cached_property
    def split_stages(self) -> frozenset[int]:
        """The stages with a split backward."""
        halves = set(self.table.letters(gives="B", always=False))
        return frozenset(action[1] for action in chain.from_iterable(self.orders) if action[0] in halves)

    @property
    def title(self) -> str:
        """Name and size, for pictures and messages.

        Example:
            >>> from pipework.schedule import fill_drain
            >>> fill_drain(4, 1).title
            'gpipe, 4 workers, 1 micro-batch'
        """
        return f"{self.name}, {self._size}"

    @property
    def _size(self) -> str:
        return f"{counted(self.workers, 'worker')}, {counted(self.micro_batches, 'micro-batch')}"

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


def checked_schedule(schedule: Schedule) -> Schedule:
    """Refuse anything but a schedule, such as its name.

    Raises:
        TypeError: the argument is something else.

    Example:
        >>> checked_schedule("1f1b")
        Traceback (most recent call last):
        TypeError: schedule is '1f1b': wanted a Schedule, such as build('1f1b', workers=4, chunks=8)
    """
    if not isinstance(schedule, Schedule):
        raise TypeError(f"schedule is {schedule!r}: wanted a Schedule, such as build('1f1b', workers=4, chunks=8)")
    return schedule


def restricted(schedule: Schedule, micro_batches: int) -> Schedule:
    """Keep the first `micro_batches` micro-batches, in the same order.

    A valid schedule stays valid, because no micro-batch needs data of another.

    Args:
        schedule: any schedule.
        micro_batches: number of micro-batches to keep, from 1 to all.

    Returns:
        A schedule of the same name and placement; the same object if all are kept.

    Raises:
        ValueError: the number is out of range.

    Example:
        >>> from pipework.schedule import fill_drain
        >>> restricted(fill_drain(2, 8), 3) == fill_drain(2, 3)
        True
    """
    if type(micro_batches) is not int or not 1 <= micro_batches <= schedule.micro_batches:
        raise ValueError(
            f"micro_batches is {micro_batches!r}: wanted an integer from 1 to the {schedule.micro_batches} of the "
            "schedule"
        )
    if micro_batches == schedule.micro_batches:
        return schedule
    orders = tuple(tuple(action for action in order if action.micro_batch < micro_batches) for order in schedule.orders)
    return replace(schedule, orders=orders)
