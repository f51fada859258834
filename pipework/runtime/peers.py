"""What a mini-batch asks of the other processes, if the workers are processes: the ranks that hold a pipe together."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from contextlib import AbstractContextManager

    import torch

    from pipework.runtime.failure import Failure
    from pipework.runtime.skips.connections import Skip
    from pipework.runtime.stage.stage_run import StageRun
    from pipework.runtime.transport import LocalTransport, Transport
    from pipework.runtime.worker_threads import WorkerThreads
    from pipework.schedule import Action, Interval


class RunSpec(NamedTuple):
    """One run of the workers, as the ranks must know it.

    Attributes:
        runs: the stages of this rank.
        placement: the worker of each stage.
        skips: the skip connections between all layers.
        micro_batches: their number.
        shares: how many of the tensors that leave the last stage for each micro-batch are wanted on every rank; None:
            all of them.
        differentiates: whether gradients are complete afterwards.
        scaler: looks for infinities in them; None: nobody does.
    """

    runs: Mapping[int, StageRun]
    placement: tuple[int, ...]
    skips: Sequence[Skip]
    micro_batches: int
    shares: int | None
    differentiates: bool
    scaler: torch.amp.GradScaler | None


class Peers(Protocol):
    """The other ranks."""

    def calling(self, what: str) -> AbstractContextManager[None]:
        """Around a call that all ranks make: whatever goes wrong in it on one of them, all learn.

        Args:
            what: a noun, such as "backward".
        """

    def starting(self, action: Action) -> None:
        """An action of this rank's worker is about to begin."""

    def transport(self, local: LocalTransport, run: RunSpec) -> Transport:
        """Connects this rank's worker with the others for one run.

        Args:
            local: what stays in this process goes this way.
            run: the run.
        """

    def during(self, failure: Failure) -> None:
        """From now on what goes wrong elsewhere is reported here."""

    def shared(self, workers: WorkerThreads, intervals: Sequence[Interval]) -> list[Interval]:
        """What the workers of all ranks did, by this rank's clock, from what this rank's did.

        Args:
            workers: of this process.
            intervals: in seconds of its clock.
        """

    def explained(self, error: BaseException) -> BaseException:
        """After a run that has failed: what is to be raised, which may be what has happened elsewhere."""
