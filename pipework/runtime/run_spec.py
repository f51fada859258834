"""What one run of the workers is: its stages, and what is wanted of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import torch

    from pipework.runtime.device import Link
    from pipework.runtime.skips.skip import Skip
    from pipework.runtime.stage.stage_run import StageRun


class RunSpec(NamedTuple):
    """One run of the workers: a forward, a backward, or a whole training step.

    Attributes:
        runs: the stages of this process, by number.
        placement: the worker of each stage.
        links: between the devices of this process's workers, see `LocalTransport`.
        skips: the skip connections between all layers.
        micro_batches: their number.
        shared_results: of each micro-batch's results in the last stage, so many tensors are sent to every process: 0,
            or 1 (the loss); None: all.
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
    shared_results: int | None
    input_gradients: bool
    differentiates: bool
    scaler: torch.amp.GradScaler | None
    one_thread: bool
