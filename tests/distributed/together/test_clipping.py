"""Clipping on several ranks changes gradients as that of PyTorch on the un-partitioned model, to the last bit."""

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipework import Mesh, Pipe

Run = Callable[..., list[Any]]


class Holding(nn.Module):
    """Parameters of several dtypes, and perhaps one of another layer."""

    def __init__(self, tied: nn.Parameter | None = None) -> None:
        super().__init__()
        dtypes = (torch.float32, torch.bfloat16, torch.float64, torch.float32)
        self.own = nn.ParameterList([nn.Parameter(torch.ones(3, 5, dtype=dtype)) for dtype in dtypes])
        self.tied = tied
        self.unused = nn.Parameter(torch.ones(2))

    def forward(self, x: Tensor) -> Tensor:
        return x


def clip(mesh: Mesh) -> None:
    first = Holding()
    model = nn.Sequential(first, Holding(), Holding(first.own[0]), Holding(first.own[2]))
    plain = copy.deepcopy(model)
    pipe = Pipe(model, mesh=mesh)

    def give(seed: int, factor: float = 1.0) -> None:
        torch.manual_seed(seed)
        for name, parameter in plain.named_parameters():
            if "unused" not in name:
                parameter.grad = torch.randn(parameter.shape).to(parameter.dtype) * factor
        for name, parameter in pipe.named_parameters():
            gradient = plain.get_parameter(name).grad
            parameter.grad = None if gradient is None else gradient.clone()

    def compare() -> None:
        for name, parameter in pipe.named_parameters():
            gradient = plain.get_parameter(name).grad
            assert gradient is None or torch.equal(parameter.grad, gradient), name

    for seed, norm_type in enumerate((1, 2.0, math.inf, 0.5)):
        give(seed)
        norm = pipe.clip_grad_norm_(0.3, norm_type)
        expected = nn.utils.clip_grad_norm_(plain.parameters(), 0.3, norm_type)
        assert norm.dtype is expected.dtype
        assert torch.equal(norm, expected)
        compare()
    give(0, math.nan)
    with pytest.raises(RuntimeError, match=r"total norm of order 2\.0 .* is nan"):
        pipe.clip_grad_norm_(0.3, error_if_nonfinite=True)
    pipe.zero_grad()
    assert torch.equal(pipe.clip_grad_norm_(0.3), torch.tensor(0.0))  # after the error, which all have seen


def test_clipping_as_in_one_process(on_ranks: Run) -> None:
    on_ranks(2, clip)
