"""The note on an out-of-memory error: its device and action, and for each stage its tensors and micro-batches."""

from __future__ import annotations

import contextlib
import itertools
from typing import TYPE_CHECKING

import torch

from pipework.runtime.device import is_accelerator
from pipework.runtime.failure import add_note
from pipework.schedule.draw.units import aligned, memory_text
from pipework.values.tensor_form import bytes_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch import Tensor

    from pipework.runtime.failure import Failure
    from pipework.runtime.stage.stage import Stage
    from pipework.runtime.stage.stage_run import StageRun

_HINT = (
    "  pipe.predict says before a step what each device will hold; it is less with more chunks, schedule='1f1b', "
    "checkpoint='always', offload='activations', no graphs=, or a balance that moves layers elsewhere"
)
_COLUMNS = ("stage", "device", "weights", "gradients", "buffers", "micro-batches")


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


def note_memory(failure: Failure, stages: Sequence[Stage], runs: Sequence[StageRun]) -> None:
    """If memory has run out, adds a note with a table of the memory of every stage.

    Args:
        failure: of a run.
        stages: of this process.
        runs: of these stages, before they drop their tensors.
    """
    if failure.error is None or not is_out_of_memory(failure.error):
        return
    with contextlib.suppress(Exception):  # an error of the table must not replace the first one
        where = f"out of memory in {failure.place}; " if failure.place else ""
        add_note(failure.error, "\n".join([f"{where}memory of the stages", *table(stages, runs), _HINT]))


def table(stages: Sequence[Stage], runs: Sequence[StageRun]) -> list[str]:
    """A line for each stage, and one for each accelerator. Weights of two stages are counted for both."""
    rows: list[tuple[str, ...]] = [_COLUMNS]
    for stage, run in zip(stages, runs, strict=True):
        parameters = [parameter for module in stage.modules for parameter in module.parameters()]
        buffers = [buffer for module in stage.modules for buffer in module.buffers()]
        gradients = [tensor.grad for tensor in (*parameters, *run.aliases.leaves)]
        texts = [memory_text(_size(tensors), "bytes") for tensors in (parameters, gradients, buffers)]
        rows.append((str(stage.index), str(stage.device.device), *texts, spans(run.in_flight) or "-"))
    lines = aligned(rows)
    for device in dict.fromkeys(stage.device.device for stage in stages):
        if is_accelerator(device):
            allocated = memory_text(torch.accelerator.memory_allocated(device), "bytes")
            reserved = memory_text(torch.accelerator.memory_reserved(device), "bytes")
            lines.append(f"  {device}: {allocated} allocated by all of this process, {reserved} reserved")
    return lines


def spans(numbers: Iterable[int]) -> str:
    """Numbers in ascending order, those that follow each other together.

    Example:
        >>> spans([0, 1, 2, 5])
        '0-2, 5'
    """
    groups = itertools.groupby(enumerate(sorted(numbers)), lambda pair: pair[1] - pair[0])
    runs = [[number for _, number in group] for _, group in groups]
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


def _size(tensors: Iterable[Tensor | None]) -> int:
    """The bytes of these tensors, each counted once."""
    return sum({id(tensor): bytes_of(tensor) for tensor in tensors if tensor is not None}.values())
