"""What a mini-batch asks of the processes that hold a pipe; and the answers where one process holds all of it."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, NamedTuple, Protocol

from pipework.runtime.transport import LocalTransport

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from contextlib import AbstractContextManager

    import torch

    from pipework.runtime.device import Link
    from pipework.runtime.failure import Failure
    from pipework.runtime.skips.skip import Skip
    from pipework.runtime.stage.stage_run import StageRun
    from pipework.runtime.transport import Transport
    from pipework.schedule import Action, Interval


class RunSpec(NamedTuple):
    """One run of the workers: a forward, a backward, or a whole training step.

    Attributes:
        runs: the stages of this process, by number.
        placement: the worker of each stage.
        links: between the devices of this process's workers, see `LocalTransport`.
        skips: the skip connections between all layers.
        micro_batches: their number.
        results_for_all: how many of the tensors that leave the last stage for each micro-batch every process gets;
            None: all of them.
        input_gradients: whether every process gets the gradients of what stage 0 was given.
        differentiates: whether gradients are complete afterwards.
        scaler: looks for infinities in the gradients; None: there is no scaler.
        one_thread: whether one thread of this process runs all its actions.
    """

    runs: Mapping[int, StageRun]
    placement: tuple[int, ...]
    links: Mapping[tuple[int, int], Link | None]
    skips: Sequence[Skip]
    micro_batches: int
    results_for_all: int | None
    input_gradients: bool
    differentiates: bool
    scaler: torch.amp.GradScaler | None
    one_thread: bool


class Peers(Protocol):
    """The processes that hold a pipe, as a step sees them.

    Attributes:
        starting: called before each action of this process's workers; None: nothing is to be called.
        are_others: whether there are other processes, for which a worker may have to wait.
    """

    @property
    def starting(self) -> Callable[[Action], None] | None:
        """See the class."""

    @property
    def are_others(self) -> bool:
        """See the class."""

    def calling(self, what: str) -> AbstractContextManager[None]:
        """Entered around a call that all processes make: an error in one of them becomes an error in all.

        Args:
            what: the name of the call, such as "backward".
        """

    def transport(self, spec: RunSpec) -> Transport:
        """Connects the workers for one run."""

    def during(self, failure: Failure) -> None:
        """From now on failures of other processes are reported to this failure."""

    def all_intervals(self, intervals: Sequence[Interval]) -> list[Interval]:
        """The recorded actions of all workers, by this process's clock, from those of this process's workers."""

    def explained(self, error: BaseException) -> BaseException:
        """The error to raise after a failed run: it may have its cause in another process."""


class LocalPeers:
    """The `Peers` of a pipe that one process holds: there are no others."""

    starting = None
    are_others = False

    def calling(self, what: str) -> AbstractContextManager[None]:
        """See `Peers.calling`."""
        return contextlib.nullcontext()

    def transport(self, spec: RunSpec) -> Transport:
        """See `Peers.transport`."""
        return LocalTransport(spec.placement, spec.links, one_thread=spec.one_thread)

    def during(self, failure: Failure) -> None:
        """See `Peers.during`."""

    def all_intervals(self, intervals: Sequence[Interval]) -> list[Interval]:
        """See `Peers.all_intervals`."""
        return list(intervals)

    def explained(self, error: BaseException) -> BaseException:
        """See `Peers.explained`."""
        return error
