"""What an action needs of other actions: the data edges of the schedule graph, defined once for all.

::

    stage 0      F ----------> (R) --> B          F to F: the value at the boundary
                 |                     ^          B to B: its gradient
                 v                     |          F to B: the activations of the own forward,
    stage 1      F ----------> (R) --> B                  through R if the micro-batch is checkpointed

With a split backward, ``I`` stands for ``B`` and ``W`` follows its ``I``. A skip connection from stage s to stage t is
an edge from F to F of the two, and one from B to B back again.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from pipework.schedule.action import Action
from pipework.schedule.schedule import Schedule


class Message(NamedTuple):
    """What goes from one stage to another for a micro-batch.

    Attributes:
        kind: ``"F"`` a value, ``"B"`` a gradient.
        source: the stage that makes it.
        target: the stage that needs it.
        micro_batch: of which piece of the mini-batch.
    """

    kind: str
    source: int
    target: int
    micro_batch: int

    @property
    def send(self) -> Action:
        """The action that sends it."""
        return Action(f"SEND_{self.kind}", self.source, self.micro_batch, self.target)

    @property
    def receive(self) -> Action:
        """The action that receives it."""
        return Action(f"RECV_{self.kind}", self.target, self.micro_batch, self.source)


def message_of(transfer: Action) -> Message:
    """What a ``SEND`` or ``RECV`` is about; the same for both.

    Example:
        >>> message_of(Action.parse("0SEND_F3")) == message_of(Action.parse("1RECV_F3"))
        True
    """
    kind, stage, micro_batch, peer = transfer
    ends = (stage, peer) if kind.startswith("SEND") else (peer, stage)
    return Message(kind[-1], *ends, micro_batch)


class Route(NamedTuple):
    """A way on which one stage's values, or gradients, reach another.

    Attributes:
        kind: ``"F"`` values, ``"B"`` gradients.
        source: the stage that makes them.
        target: the stage that needs them.
        skip: which of the schedule's skips it is; -1 for a boundary.
    """

    kind: str
    source: int
    target: int
    skip: int

    def message(self, micro_batch: int) -> Message:
        """What goes this way for a micro-batch."""
        return Message(self.kind, self.source, self.target, micro_batch)


def routes(schedule: Schedule) -> tuple[Route, ...]:
    """All ways between stages, of one worker or of two.

    Example:
        >>> from pipework.schedule import fill_drain
        >>> routes(fill_drain(2, 1))
        (Route(kind='F', source=0, target=1, skip=-1), Route(kind='B', source=1, target=0, skip=-1))
    """
    pairs = [*((stage, stage + 1, -1) for stage in range(schedule.stages - 1))]
    pairs += [(source, target, number) for number, (source, target) in enumerate(schedule.skips)]
    there = [Route("F", source, target, skip) for source, target, skip in pairs]
    back = [] if schedule.inference else [Route("B", target, source, skip) for source, target, skip in pairs]
    return (*there, *back)


def crossings(schedule: Schedule) -> Iterator[Route]:
    """The ways that lead from one worker to another."""
    for route in routes(schedule):
        if schedule.placement[route.source] != schedule.placement[route.target]:
            yield route


def recomputed(schedule: Schedule) -> frozenset[tuple[int, int]]:
    """The (stage, micro-batch) pairs that have a recompute action: those that are checkpointed.

    Example:
        >>> from pipework.schedule import fill_drain, with_recompute
        >>> sorted(recomputed(with_recompute(fill_drain(2, 2), 1)))
        [(0, 0), (1, 0)]
    """
    return frozenset([action[1:3] for order in schedule.orders for action in order if action[0] == "R"])


def product(action: Action) -> Action:
    """The name under which others need what an action makes; a ``B`` gives what an ``I`` gives.

    Example:
        >>> str(product(Action("B", 1, 0)))
        '1I0'
    """
    return Action("I", action.stage, action.micro_batch) if action.kind == "B" else action
