"""The module `checkpoint` of `torch.distributed.pipeline.sync`."""

import torch

from pipework.compat.sync.checkpoint import checkpoint, is_checkpointing, is_recomputing
from pipework.model import checkpoint as modes


def test_both_runs_are_marked() -> None:
    seen = []

    def double(x: torch.Tensor, factor: int) -> torch.Tensor:
        seen.append((is_checkpointing(), is_recomputing()))
        return factor * x

    x = torch.ones(2, requires_grad=True)
    checkpoint(double, (x, 2)).sum().backward()
    assert seen == [(True, False), (False, True)]
    assert x.grad.tolist() == [2.0, 2.0]


def test_the_marks_are_those_of_pipes() -> None:
    assert is_checkpointing is modes.is_checkpointing
    assert is_recomputing is modes.is_recomputing
