"""Which losses were brought backward on this rank: a mark for each of the latest calls, which ranks compare.

With the loss inside, `loss.backward()` delivers the gradients of a rank's own layers and asks no other rank. A rank
that leaves it out would go on without gradients. One that multiplies the loss by another number than the others would
get gradients of another scale.
"""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable

    from pipework.autograd.factor import Factor

_BITS: Final = 2  # of a mark; one without a loss to bring backward is 0
_WAITS: Final = 1
_DELIVERED: Final = 2
_CALLS: Final = 31  # whose marks fit into a positive number of 64 bits
_CLOSE: Final = 1e-3  # factors that two processors have computed, of numbers that they may have rounded differently


class Delivered(NamedTuple):
    """What a rank says of its losses.

    Attributes:
        marks: of the latest calls.
        call: of the loss whose factor is told, counted from 1; 0: none is told.
        factor: by which its gradients were multiplied, see `Factor`.
    """

    marks: int = 0
    call: int = 0
    factor: float = 1.0


class DeliveredLosses:
    """The marks of one rank.

    Example:
        >>> from pipework.autograd.factor import Factor
        >>> here, there = DeliveredLosses(), DeliveredLosses()
        >>> for losses in (here, there):
        ...     losses.begin_call()
        >>> delivered, _ = here.expect(), there.expect()
        >>> delivered(Factor(1.0))
        >>> here.difference(there.marks)
        (1, True)
    """

    def __init__(self) -> None:
        self.marks = 0  # that of the last call is in the lowest bits
        self._call = 0
        self._latest: tuple[int, Factor] | None = None  # of the last call that was brought backward

    def begin_call(self) -> None:
        """The next call begins; a mark that says nothing is added."""
        self._call += 1
        self.marks = self.marks << _BITS & (1 << _BITS * _CALLS) - 1

    def expect(self) -> Callable[[Factor], None]:
        """The present call has a loss for this rank's layers. What is returned is to be called at its backward."""
        self.marks |= _WAITS
        return functools.partial(self._deliver, self._call)

    def _deliver(self, call: int, factor: Factor) -> None:
        if self._latest is None or call >= self._latest[0]:  # of several backwards of a call the last one counts
            self._latest = call, factor
        shift = _BITS * (self._call - call)
        if shift < _BITS * _CALLS:  # else the mark is gone
            self.marks = self.marks & ~(_WAITS << shift) | _DELIVERED << shift

    def told(self, *, waits: bool) -> Delivered:
        """What this rank tells the others.

        Args:
            waits: whether the host may wait for a factor that an accelerator computes.
        """
        if self._latest is None:
            return Delivered(self.marks)
        call, factor = self._latest
        return Delivered(self.marks, call, factor.number) if waits or factor.is_on_host else Delivered(self.marks)

    @staticmethod
    def other_factor(mine: Delivered, theirs: Delivered) -> bool:
        """Whether two ranks multiplied the gradients of a call by different factors.

        Example:
            >>> DeliveredLosses.other_factor(Delivered(0, 3, 1.0), Delivered(0, 3, 0.5))
            True
            >>> DeliveredLosses.other_factor(Delivered(0, 3, 1.0), Delivered(0, 2, 0.5))
            False
        """
        one, other = mine.factor, theirs.factor
        if not mine.call or mine.call != theirs.call or (math.isnan(one) and math.isnan(other)):
            return False
        return not math.isclose(one, other, rel_tol=_CLOSE)

    def difference(self, theirs: int) -> tuple[int, bool] | None:
        """The first call whose loss was brought backward on one of two ranks, and not on the other.

        Args:
            theirs: the marks of the other rank, which has begun as many calls.

        Returns:
            The number of the call, counted from 1, and whether it was on this rank; None: there is no such call.
        """
        if self.marks == theirs:
            return None
        for age in reversed(range(_CALLS)):
            here, there = (marks >> _BITS * age & (1 << _BITS) - 1 for marks in (self.marks, theirs))
            if here and there and here != there:
                return self._call - age, here == _DELIVERED
        return None
