import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from pipework import MicroBatches, Pipe, PipeWarning


class Last(nn.Module):
    def __init__(self, function: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Any:
        return self.function(x)


def pipe_of(function: Callable[[Tensor], Any], chunks: int = 4, **options: Any) -> Pipe:
    return Pipe(nn.Sequential(nn.Linear(8, 8), Last(function)), chunks, balance=[1, 1], devices=["cpu"] * 2, **options)


def test_a_mean_over_the_batch() -> None:
    pipe, x = pipe_of(lambda x: x.mean(0, keepdim=True)), torch.randn(16, 8)
    with pytest.warns(
        PipeWarning, match=r"the output has the shape \(1, 8\) for each of 4 .* joined along it, it is \(4, 8\)"
    ) as seen:
        pipe(x).sum().backward()
    assert len(seen) == 1
    assert seen[0].filename == __file__
    pipe(x)  # warnings are errors


@pytest.mark.parametrize(
    ("function", "rows"),
    [
        (lambda x: x[:, :6].mean(0), 16),
        (lambda x: x.mean(0), 14),  # 8 numbers, for 4 rows and for 3
        (lambda x: x.new_zeros(3, 5), 16),
    ],
)
def test_other_sizes_that_do_not_come_from_the_rows(function: Callable[[Tensor], Any], rows: int) -> None:
    with pytest.warns(PipeWarning, match="for each of 4 micro-batches, the first of which has 4 rows"):
        pipe_of(function).eval()(torch.randn(rows, 8))


def test_names_the_tensor_and_looks_at_the_first_outputs_of_a_pipe_with_a_loss() -> None:
    pipe = pipe_of(
        lambda x: {"rows": x, "pooled": x.sum(0, keepdim=True)},
        schedule="1f1b",
        loss_fn=lambda output, target: functional.mse_loss(output["rows"], target),
    )
    x = torch.randn(16, 8)
    pipe(x, target=x).backward()
    other = copy.deepcopy(pipe)
    for each in (pipe, other):
        with pytest.warns(PipeWarning, match=r"^output tensor 1 has the shape \(1, 8\)"):
            each(x, target=x, return_output=True)
        with torch.no_grad():
            each(x)


RIGHT = {
    "rows": lambda x: x,
    "flattened": lambda x: x.view(-1, 2),
    "pairs": lambda x: x.view(-1, 2, 8).mean(1),
    "a mean": lambda x: x.mean(),
    "selected": lambda x: x[x[:, 0] > 0],
    "nothing": lambda x: x[:0],
    "a mask for all": lambda x: (x, len(x), None),
}


@pytest.mark.parametrize("name", RIGHT)
@pytest.mark.parametrize("rows", [16, 1, 4])
def test_right_programs(name: str, rows: int) -> None:
    if name == "pairs" and rows < 16:
        return
    x = torch.randn(rows, 8)
    x[:, 0] = 1.0
    x[:3] = -x[:3]
    pipe_of(RIGHT[name])(x)


def test_uneven_micro_batches_and_those_of_the_caller() -> None:
    pipe_of(lambda x: x.repeat_interleave(3, 0))(torch.randn(9, 8))
    pipe_of(lambda x: x.mean(0, keepdim=True))(MicroBatches([torch.randn(4, 8), torch.randn(4, 8)]))
    pipe_of(lambda x: x.mean(0, keepdim=True), chunks=1, schedule="gpipe").eval()(torch.randn(4, 8))


def test_a_size_that_fits_by_chance_is_seen_when_the_rows_change() -> None:
    pipe = pipe_of(lambda x: x.mean(0))  # 8 numbers, which could be two for each of 4 rows
    pipe(torch.randn(16, 8))
    with pytest.warns(PipeWarning, match=r"the output has the shape \(8,\) for each of 4 .* first of which has 2 rows"):
        pipe(torch.randn(8, 8))
    pipe(torch.randn(32, 8))


def test_flattened_rows_may_change() -> None:
    pipe = pipe_of(lambda x: x.flatten())
    for rows in (16, 8, 14):
        pipe(torch.randn(rows, 8))
