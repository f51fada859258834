"""Data dependencies between actions: the edges of the schedule graph.

::

    stage 0      F ----------> (R) --> B          F to F: the value at the boundary
                 |                     ^          B to B: its gradient
                 v                     |          F to B: the activations of the own forward,
    stage 1      F ----------> (R) --> B                  through R if the micro-batch is checkpointed

In a split backward, ``I`` takes the place of ``B``, and ``W`` depends on its ``I``. A skip connection from stage s to
stage t is an edge from the F of s to the F of t, and one from the B of t to the B of s. What leaves the device goes
from F through ``O`` and ``L`` to R, or to B. The edges of each kind are in the table of kinds.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence
from typing import NamedTuple

from pipework.schedule.action import Action
from pipework.schedule.kinds import Kinds
from pipework.schedule.schedule import Schedule


def counterpart(transfer: Action) -> Action:
    """The other side of a transfer: the ``RECV`` of a ``SEND``, the ``SEND`` of a ``RECV``.

    Example:
        >>> str(counterpart(Action.parse("0SEND_F3"))), str(counterpart(Action.parse("0RECV_B3@2")))
        ('1RECV_F3', '2SEND_B3@0')
    """
    kind, stage, micro_batch, peer = transfer
    other = f"RECV{kind[4:]}" if kind.startswith("SEND") else f"SEND{kind[4:]}"
    return Action(other, peer, micro_batch, stage)


class Route(NamedTuple):
    """A connection on which values, or gradients, go from one stage to another.

    Attributes:
        kind: ``"F"`` values, ``"B"`` gradients.
        source: the stage that makes them.
        target: the stage that needs them.
        skip: index among the schedule's skips; -1 for a boundary.
    """

    kind: str
    source: int
    target: int
    skip: int

    def send(self, micro_batch: int) -> Action:
        """The action that sends a micro-batch's value, or gradient, on this route."""
        return Action(f"SEND_{self.kind}", self.source, micro_batch, self.target)

    def receive(self, micro_batch: int) -> Action:
        """The action that receives it."""
        return Action(f"RECV_{self.kind}", self.target, micro_batch, self.source)


def routes(schedule: Schedule) -> tuple[Route, ...]:
    """All routes between stages, whether on one worker or on two.

    Example:
        >>> from pipework.schedule import fill_drain
        >>> routes(fill_drain(2, 1))
        (Route(kind='F', source=0, target=1, skip=-1), Route(kind='B', source=1, target=0, skip=-1))
    """
    pairs = [(stage, stage + 1, -1) for stage in range(schedule.stages - 1)]
    pairs += [(source, target, number) for number, (source, target) in enumerate(schedule.skips)]
    there = [Route("F", source, target, skip) for source, target, skip in pairs]
    back = [] if schedule.inference else [Route("B", target, source, skip) for source, target, skip in pairs]
    return (*there, *back)


def crossings(schedule: Schedule) -> Iterator[Route]:
    """The routes from one worker to another."""
    for route in routes(schedule):
        if schedule.placement[route.source] != schedule.placement[route.target]:
            yield route


def recomputed(schedule: Schedule) -> frozenset[tuple[int, int]]:
    """The (stage, micro-batch) pairs with a recompute action, which are the checkpointed ones.

    Example:
        >>> from pipework.schedule import fill_drain, with_recompute
        >>> sorted(recomputed(with_recompute(fill_drain(2, 2), 1)))
        [(0, 0), (1, 0)]
    """
    again = schedule.kinds.intersection(row.letter for row in schedule.table.values() if row.leaves)
    return frozenset([action[1:3] for order in schedule.orders if again for action in order if action[0] in again])


def offloaded(schedule: Schedule) -> frozenset[tuple[int, int]]:
    """The (stage, micro-batch) pairs whose activations go to the memory of the host.

    Example:
        >>> from pipework.schedule import build, with_offload
        >>> sorted(offloaded(with_offload(build("1f1b", workers=3, chunks=3))))
        [(0, 0), (0, 1)]
    """
    leaving = schedule.kinds.intersection(schedule.table.letters(scope="copy", phase="forward"))
    return frozenset([action[1:3] for order in schedule.orders if leaving for action in order if action[0] in leaving])


def maker(product: Action, order: Container[Action], table: Kinds) -> Action:
    """The action of an order that makes a product, such as the ``I`` that makes that of a ``B``.

    Returns:
        The product itself, if none makes it: it is the loss, an action that is missing, or a transfer.

    Example:
        >>> from pipework.schedule.kinds import KINDS
        >>> str(maker(Action("B", 1, 0), [Action("I", 1, 0)], KINDS))
        '1I0'
    """
    makers = (product._replace(kind=kind) for kind in table.makers.get(product.kind, ()))
    return next((each for each in makers if each in order), product)


def awaited(order: Sequence[Action], table: Kinds) -> Mapping[int, int]:
    """Where a worker waits until an ``O`` has ended, so that the memory of its micro-batch is freed.

    That is at its next ``O``, or at its next ``L`` if a computation is between or that is its own. So one ``O`` at a
    time is under way, a computation hides it, and where memory is freed does not depend on times::

        F3 O3 B0 L1 F4 O4      O3 is awaited at L1: B0 hides it
        F3 O3 L1 B0 F4 O4      O3 is awaited at O4: B0 and F4 hide it

    Returns:
        The position of each such ``O`` or ``L`` in the worker's order, to that of the ``O`` that is awaited.

    Example:
        >>> from pipework.schedule.kinds import KINDS
        >>> dict(awaited([Action.parse(text) for text in "0F3 0O3 0B0 0L1 0F4 0O4".split()], KINDS))
        {3: 1}
    """
    scopes = {kind: row.scope for kind, row in table.items()}
    leaving = set(table.letters(scope="copy", phase="forward"))
    found: dict[int, int] = {}
    under_way, computed = -1, False
    for position, action in enumerate(order):
        kind = action[0]
        if scopes[kind] == "micro-batch":
            computed = True
        elif scopes[kind] == "copy":
            leaves = kind in leaving
            if under_way >= 0 and (leaves or computed or order[under_way][1:3] == action[1:3]):
                found[position], under_way = under_way, -1
            if leaves:
                under_way, computed = position, False
    return found
