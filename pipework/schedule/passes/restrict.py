"""A pass that drops micro-batches, for a smaller last batch."""

from __future__ import annotations

from dataclasses import replace

from pipework.schedule.schedule import Schedule


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
