"""The caller's generator at the calls of a pipe; after one that has failed, all ranks have it in the same state again.

Each rank draws the key of a training call by itself. An error on one rank may come before that, and the others know of
it when they have drawn, or even in their next call. What a rank has drawn counts on all of them, or on none: it does if
the rank that failed had begun the call together with the others.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from pipework.runtime.random.streams import draw_key

if TYPE_CHECKING:
    from torch import Tensor

    from pipework.distributed.health.status import PeerFailure


class GeneratorStates:
    """The states of PyTorch's CPU generator on this rank.

    Attributes:
        call: the number of the present call, or of the last one.
        counts: whether what it has drawn does.
        has_drawn: whether it has drawn a key.

    Example:
        >>> states = GeneratorStates()
        >>> states.enter()
        >>> before = torch.get_rng_state()
        >>> _ = torch.randn(3)
        >>> states.align(None)
        >>> torch.equal(torch.get_rng_state(), before)
        True
    """

    def __init__(self) -> None:
        self.call = 0
        self.counts = self.has_drawn = False
        self._entered: Tensor | None = None
        self._left: Tensor | None = None
        self._are_aligned = False

    def enter(self) -> None:
        """A call begins."""
        self.call += 1
        self.counts = self.has_drawn = False
        self._entered = torch.default_generator.get_state()

    def leave(self) -> None:
        """It is over, and the pipe can go on."""
        self._left = torch.default_generator.get_state()

    def align(self, failure: PeerFailure | None) -> None:
        """The present call has failed, or the pipe while it is made: sets the state that the other ranks have, too.

        Later failures of the same pipe change nothing.

        Args:
            failure: of another rank; None: of this one.
        """
        if self._are_aligned:
            return
        self._are_aligned = True
        call, counts = (self.call, self.counts) if failure is None else (failure.call or self.call, failure.counts)
        if call > self.call or (call == self.call and counts):
            if counts and not (call == self.call and self.has_drawn):  # this rank is late
                draw_key()
            return
        state = self._left if call < self.call else self._entered
        if state is not None:
            torch.default_generator.set_state(state)
