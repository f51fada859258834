"""The table of what stages hold; tests/faults/test_out_of_memory.py runs pipes out of memory."""

import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from pipework.runtime.failure import Failure
from pipework.runtime.out_of_memory import is_out_of_memory, note_memory, table
from pipework.schedule import Action


def stages_and_runs() -> tuple[list[Any], list[Any]]:
    tied = nn.Linear(256, 1, bias=False)  # 1 KiB
    norm = nn.BatchNorm1d(128)  # 1 KiB of parameters, and 1 KiB and 8 bytes of buffers
    alias = torch.zeros(256, requires_grad=True)
    alias.grad = torch.ones(256)
    stages = [
        SimpleNamespace(index=number, modules=modules, device=SimpleNamespace(device=torch.device("cpu")))
        for number, modules in enumerate([[tied, tied], [norm]])
    ]
    runs = [
        SimpleNamespace(aliases=SimpleNamespace(leaves=leaves), in_flight=numbers)
        for leaves, numbers in (([alias], {3, 2}), ([], set()))
    ]
    return stages, runs


def test_the_table_counts_what_each_stage_holds_once() -> None:
    head, first, second = [re.split("  +", line.strip()) for line in table(*stages_and_runs())]
    assert head == ["stage", "device", "weights", "gradients", "buffers", "micro-batches"]
    assert first == ["0", "cpu", "1 KiB", "1 KiB", "0 B", "2-3"]
    assert second == ["1", "cpu", "1 KiB", "0 B", "1.01 KiB", "-"]


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (MemoryError(), True),
        (torch.OutOfMemoryError(), True),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), True),
        (RuntimeError("shapes differ"), False),
        (ValueError("DefaultCPUAllocator"), False),
        (None, False),
    ],
)
def test_only_such_an_error_gets_the_table(error: BaseException | None, expected: bool) -> None:
    assert is_out_of_memory(error) is expected
    failure = Failure(lambda: None)
    if error is not None:
        failure.report(error, Action("B", 1, 2))
    note_memory(failure, *stages_and_runs())
    heading = "pipework: out of memory in stage 1, micro-batch 2, action B; memory of the stages\n"
    assert any(note.startswith(heading) for note in getattr(error, "__notes__", ())) is expected
