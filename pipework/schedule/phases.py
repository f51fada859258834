"""The two phases of a schedule whose loss is computed outside of the pipe."""

from __future__ import annotations

from pipework.schedule.action import Action
from pipework.schedule.schedule import Schedule

Orders = tuple[tuple[Action, ...], ...]
"""The actions of each worker, as in :attr:`Schedule.orders`."""


def split_at_loss(schedule: Schedule) -> tuple[Orders, Orders]:
    """Split every worker's order before its first action that is no forward.

    The pipe runs the first phase, the caller computes the loss of all outputs, and the pipe runs the second phase.

    Args:
        schedule: no worker may have a forward after its first backward (or recompute).

    Returns:
        The orders before the loss, and the orders after it.

    Raises:
        ValueError: a forward comes after another action, so the loss must be computed inside the pipe.

    Example:
        >>> from pipework.schedule import fill_drain
        >>> fill, drain = split_at_loss(fill_drain(2, 1))
        >>> [str(action) for order in drain for action in order]
        ['0B0', '1B0']
    """
    fill = []
    drain = []
    for worker, order in enumerate(schedule.orders):
        cut = next((position for position, action in enumerate(order) if action.kind != "F"), len(order))
        late = next((action for action in order[cut:] if action.kind == "F"), None)
        if late is not None:
            raise ValueError(
                f"schedule {schedule.name!r} runs the forward {late} on worker {worker} after {order[cut]}, so it "
                "needs the loss inside the pipe: give the pipe a loss_fn and a target, or choose schedule='gpipe'"
            )
        fill.append(order[:cut])
        drain.append(order[cut:])
    return tuple(fill), tuple(drain)
