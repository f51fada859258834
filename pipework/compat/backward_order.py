"""The order of backwards in the old libraries: from the last micro-batch to the first."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pipework.schedule import Schedule


def from_last_to_first(schedule: Schedule) -> Schedule:
    """Reverses the backwards of fill-drain, each with its recomputation before it.

    A parameter's gradient is then the sum over micro-batches .., 2, 1, 0, to whose last bits old results refer. The
    last micro-batch, which 'except_last' does not recompute, is the first to free its activations.

    Args:
        schedule: one in which each worker runs all its forwards first.

    Example:
        >>> from pipework.schedule import fill_drain, with_recompute
        >>> [str(action) for action in from_last_to_first(with_recompute(fill_drain(1, 3), 2)).orders[0]]
        ['0F0', '0F1', '0F2', '0B2', '0R1', '0B1', '0R0', '0B0']
    """
    orders = []
    for order in schedule.orders:
        forwards = [action for action in order if action.kind == "F"]
        others = [action for action in order if action.kind != "F"]
        orders.append((*forwards, *sorted(others, key=lambda action: -action.micro_batch)))
    return replace(schedule, orders=tuple(orders))
