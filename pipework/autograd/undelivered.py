"""Losses that were never brought backward, so that the gradients which the pipe has computed reach no parameter."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from pipework.autograd.nodes import LossInside

FEW: Final = 8
"""So many first losses a program may drop, for example because they are not finite."""


class UndeliveredLosses:
    """Counts the first losses that were dropped, until one is brought backward.

    With the loss inside a call computes all gradients, so `loss.backward()` is easily taken for superfluous. A loss
    that is still there may be one of several that are added up.

    Example:
        >>> losses = UndeliveredLosses()
        >>> [len(losses.doubts()) for _ in range(2)]
        [0, 0]
    """

    def __init__(self) -> None:
        self._losses: list[weakref.ref[LossInside]] | None = []  # None: the question is settled

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy of a pipe has had no losses."""
        return UndeliveredLosses, ()

    def add(self, loss: LossInside) -> None:
        """A loss that is about to be returned."""
        losses = self._losses  # a backward on another thread may settle the question at any moment
        if losses is not None:
            loss.begun = self._settle
            losses.append(weakref.ref(loss))

    def doubts(self) -> list[str]:
        """What there is to be warned of, once."""
        losses = self._losses
        if losses is None or sum(loss() is None for loss in losses) < FEW:
            return []
        self._settle()
        return [
            f"loss.backward() was called on none of the first {FEW} losses of this pipe: a call computes the gradients "
            "and loss.backward() delivers them to the parameters, so optimizer.step() has changed nothing. Call it "
            "after each pipe(x, target=y); where the value alone is wanted, call the pipe under torch.no_grad()"
        ]

    def _settle(self) -> None:
        self._losses = None
