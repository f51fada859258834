"""What an action needs of other actions: the data edges of the schedule graph, defined once for all.

::

    stage 0      F ----------> (R) --> B          F to F: the value at the boundary
                 |                     ^          B to B: its gradient
                 v                     |          F to B: the activations of the own forward,
    stage 1      F ----------> (R) --> B                  through R if the micro-batch is checkpointed

With a split backward, ``I`` stands for ``B`` and ``W`` follows its ``I``.
"""

from __future__ import annotations

from collections.abc import Set

from pipework.schedule.action import Action
from pipework.schedule.schedule import Schedule


def recomputed(schedule: Schedule) -> frozenset[tuple[int, int]]:
    """The (stage, micro-batch) pairs that have a recompute action: those that are checkpointed.

    Example:
        >>> from pipework.schedule import fill_drain, with_recompute
        >>> sorted(recomputed(with_recompute(fill_drain(2, 2), 1)))
        [(0, 0), (1, 0)]
    """
    actions = (action for order in schedule.orders for action in order)
    return frozenset((stage, micro_batch) for kind, stage, micro_batch, _ in actions if kind == "R")


def product(action: Action) -> Action:
    """The name under which others need what an action makes; a ``B`` gives what an ``I`` gives.

    Example:
        >>> str(product(Action("B", 1, 0)))
        '1I0'
    """
    return Action("I", action.stage, action.micro_batch) if action.kind == "B" else action


def needs(action: Action, stages: int, checkpointed: Set[tuple[int, int]] = frozenset()) -> tuple[Action, ...]:
    """The products that must exist before an action may start.

    Args:
        action: which.
        stages: how many stages there are.
        checkpointed: the (stage, micro-batch) pairs that are recomputed; see :func:`recomputed`.

    Returns:
        Products, as :func:`product` names them.

    Example:
        >>> [str(needed) for needed in needs(Action("B", 0, 5), stages=2)]
        ['0F5', '1I5']
    """
    kind, stage, micro_batch, _ = action
    if kind == "F":
        return (Action("F", stage - 1, micro_batch),) if stage else ()
    if kind == "R":
        return (Action("F", stage, micro_batch),)
    if kind == "W":
        return (Action("I", stage, micro_batch),)
    own = Action("R" if (stage, micro_batch) in checkpointed else "F", stage, micro_batch)
    return (own, Action("I", stage + 1, micro_batch)) if stage + 1 < stages else (own,)
