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

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Final, NamedTuple

from pipework.schedule.action import Action
from pipework.schedule.schedule import Schedule


def counterpart(transfer: Action) -> Action:
    """The other side of a transfer: of a ``SEND`` the ``RECV``, and the other way round.

    Example:
        >>> str(counterpart(Action.parse("0SEND_F3"))), str(counterpart(Action.parse("0RECV_B3@2")))
        ('1RECV_F3', '2SEND_B3@0')
    """
    kind, stage, micro_batch, peer = transfer
    other = f"RECV{kind[4:]}" if kind.startswith("SEND") else f"SEND{kind[4:]}"
    return Action(other, peer, micro_batch, stage)


_SEND: Final[Mapping[str, str]] = MappingProxyType({"F": "SEND_F", "B": "SEND_B"})
_RECEIVE: Final[Mapping[str, str]] = MappingProxyType({"F": "RECV_F", "B": "RECV_B"})


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

    def send(self, micro_batch: int) -> Action:
        """The action that sends what goes this way for a micro-batch."""
        return Action(_SEND[self.kind], self.source, micro_batch, self.target)

    def receive(self, micro_batch: int) -> Action:
        """The action that receives it."""
        return Action(_RECEIVE[self.kind], self.target, micro_batch, self.source)


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
