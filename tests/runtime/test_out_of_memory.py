"""The table of what stages hold; tests/faults/test_out_of_memory.py runs pipes out of memory."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from pipework.runtime.out_of_memory import is_out_of_memory, note_memory, table


def stages_and_runs() -> tuple[list[Any], list[Any]]:
    tied = nn.Linear(256, 1, bias=False)  # 1 KiB
    norm = nn.BatchNorm1d(128)  # 1 KiB of parameters, and 1 KiB and 8 bytes of buffers
    alias = torch.zeros(256, requires_grad=True)
    alias.grad = torch.ones(256)
    stages = [
        SimpleNamespace(index=number, modules=modules, device=SimpleNamespace(device=torch.device("cpu")))
        for number, modules in enumerate([[tied, tied], [norm]])
    ]
    return stages, [SimpleNamespace(aliases=SimpleNamespace(leaves=leaves)) for leaves in ([alias], [])]


def test_the_table_counts_what_each_stage_holds_once() -> None:
    head, first, second, hint = table(*stages_and_runs())
    assert head.split() == ["stage", "device", "parameters", "gradients", "buffers"]
    assert first.split() == ["0", "cpu", "1", "KiB", "1", "KiB", "0", "B"]
    assert second.split() == ["1", "cpu", "1", "KiB", "0", "B", "1.01", "KiB"]
    assert "more chunks" in hint


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
    note_memory(error, *stages_and_runs())
    assert bool(getattr(error, "__notes__", ())) is expected


def test_a_table_that_cannot_be_made_leaves_the_error_as_it_is() -> None:
    class Broken:
        index = 0

        @property
        def modules(self) -> list[nn.Module]:
            raise MemoryError

    error = MemoryError("first")
    note_memory(error, [Broken()], [None])
    assert not hasattr(error, "__notes__")
