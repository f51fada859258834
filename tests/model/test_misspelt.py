"""A misspelt argument of the pipe is not taken for an input of its first layer."""

from typing import Any

import pytest
import torch
from torch import nn

from pipework import Pipe


class Takes(nn.Linear):
    def forward(self, x: torch.Tensor, targets: Any = None, **options: Any) -> torch.Tensor:
        return super().forward(x)


def pipe_of(first: nn.Module, **options: Any) -> Pipe:
    module = nn.Sequential(first, nn.Linear(4, 4))
    return Pipe(module, 2, balance=[1, 1], devices=["cpu"] * 2, loss_fn=nn.functional.mse_loss, **options)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize(
    ("keyword", "meant"), [("targets", "target"), ("Target", "target"), ("output", "outputs"), ("return_outputs", "re")]
)
def test_a_misspelt_argument_of_the_pipe(schedule: str, keyword: str, meant: str) -> None:
    pipe, x = pipe_of(nn.Linear(4, 4), schedule=schedule), torch.randn(4, 4)
    pipe(x, target=x).backward()
    for _ in range(2):
        with pytest.raises(TypeError, match=rf"pipe\(\.\.\., {keyword}=.*layer '0' \(Linear\).*did you mean {meant}"):
            pipe(x, **{keyword: x})


def test_what_the_first_layer_takes_is_an_input() -> None:
    pipe, x = pipe_of(Takes(4, 4)), torch.randn(4, 4)
    pipe(x, targets=x, target=x).backward()
    pipe(x, output=3, target=x).backward()
    renaming = nn.Linear(4, 4)
    renaming.register_forward_pre_hook(lambda module, args, kwargs: ((kwargs["targets"],), {}), with_kwargs=True)
    pipe_of(renaming)(targets=x, target=x).backward()
    pipe.add_module("0", nn.Linear(4, 4))
    with pytest.raises(TypeError, match="did you mean target="):
        pipe(x, targets=x)


def test_another_unknown_keyword_is_the_layers_own_error() -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'mask'"):
        pipe_of(nn.Linear(4, 4))(torch.randn(4, 4), mask=None)
