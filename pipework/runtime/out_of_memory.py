"""The note on an out-of-memory error: how much memory each stage holds, which another balance would change."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import torch

from pipework.runtime.device import is_accelerator
from pipework.runtime.failure import add_note
from pipework.schedule.draw.aligned import aligned
from pipework.schedule.draw.units import memory_text

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch import Tensor

    from pipework.runtime.stage.stage import Stage
    from pipework.runtime.stage.stage_run import StageRun


def is_out_of_memory(error: BaseException | None) -> bool:
    """Whether an error says that memory has run out, on an accelerator or on the CPU.

    The allocator of the CPU has no exception class of its own.

    Example:
        >>> is_out_of_memory(torch.OutOfMemoryError()), is_out_of_memory(RuntimeError("shapes differ"))
        (True, False)
    """
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and "DefaultCPUAllocator" in str(error)


def note_memory(error: BaseException | None, stages: Sequence[Stage], runs: Sequence[StageRun]) -> None:
    """If the error says that memory has run out, adds a note with a table of the memory of every stage."""
    if error is not None and is_out_of_memory(error):
        with contextlib.suppress(RuntimeError, MemoryError):  # an error of the table must not replace the first one
            add_note(error, "\n".join(["memory of the stages, without activations", *table(stages, runs)]))


def table(stages: Sequence[Stage], runs: Sequence[StageRun]) -> list[str]:
    """A line for each stage, and one for each accelerator. Shared memory is counted for each stage that has it."""
    rows: list[tuple[str, ...]] = [("stage", "device", "parameters", "gradients", "buffers")]
    for stage, run in zip(stages, runs, strict=True):
        parameters = [parameter for module in stage.modules for parameter in module.parameters()]
        buffers = [buffer for module in stage.modules for buffer in module.buffers()]
        gradients = [tensor.grad for tensor in (*parameters, *run.aliases.leaves)]
        sizes = [_size(tensors) for tensors in (parameters, gradients, buffers)]
        rows.append((str(stage.index), str(stage.device.device), *sizes))
    lines = aligned(rows)
    for device in dict.fromkeys(stage.device.device for stage in stages):
        if is_accelerator(device):
            allocated, reserved = torch.accelerator.memory_allocated(device), torch.accelerator.memory_reserved(device)
            lines.append(
                f"  {device}: {memory_text(allocated, 'bytes')} allocated by all of this process, activations "
                f"included, {memory_text(reserved, 'bytes')} reserved"
            )
    return [*lines, "  less is needed with more chunks, checkpoint='always', or a balance that moves layers elsewhere"]


def _size(tensors: Iterable[Tensor | None]) -> str:
    """The bytes of these tensors, each counted once."""
    distinct = {id(tensor): tensor.nbytes for tensor in tensors if tensor is not None}
    return memory_text(sum(distinct.values()), "bytes")
