"""Random numbers that a layer draws again in the backward pass, or only there."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils import checkpoint as torch_checkpoint

from tests.conftest import WAYS

outside = WAYS["outside"].pipe


class Checkpointed(nn.Module):
    """Runs a module under PyTorch's own checkpoint."""

    def __init__(self, module: nn.Module, use_reentrant: bool) -> None:
        super().__init__()
        self.module = module
        self.use_reentrant = use_reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch_checkpoint.checkpoint(self.module, x, use_reentrant=self.use_reentrant)


class NoiseInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, drawn: list[torch.Tensor]) -> torch.Tensor:
        ctx.drawn = drawn
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        noise = torch.rand_like(gradient)
        ctx.drawn.append(noise)
        return gradient + noise, None


class NoisyGradient(nn.Module):
    def __init__(self, drawn: list[torch.Tensor]) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.drawn = drawn

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return NoiseInBackward.apply(self.linear(x), self.drawn)


def test_numbers_drawn_in_backward_depend_on_the_seed_alone(checkpoint: str) -> None:
    drawn: list[torch.Tensor] = []
    module = nn.Sequential(*(NoisyGradient(drawn) for _ in range(3)))
    pipe = outside(module, 4, checkpoint, balance=[1] * 3, share=True)
    x = torch.randn(8, 4)

    def gradients(seed: int) -> list[torch.Tensor]:
        drawn.clear()
        torch.manual_seed(seed)
        return list(torch.autograd.grad(pipe(x).sum(), list(pipe.parameters())))

    first = gradients(seed=1)
    assert len({tuple(noise.flatten().tolist()) for noise in drawn}) == len(pipe) * 4
    for _ in range(10):
        assert all(map(torch.equal, gradients(seed=1), first))
    assert not any(map(torch.equal, gradients(seed=2), first))


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_pytorchs_checkpoint_with_dropout_trains_alike(
    way: Any, use_reentrant: bool, checkpoint: str, assert_trained_alike: Callable[..., None]
) -> None:
    def layer() -> nn.Module:
        return Checkpointed(nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Tanh()), use_reentrant)

    plain = nn.Sequential(layer(), nn.Dropout(0.5), layer(), nn.Linear(8, 2))
    pipe = way.pipe(plain, 3, checkpoint, balance=[1, 1, 1, 1])
    assert_trained_alike(plain, pipe, [(torch.randn(6, 8, requires_grad=True),)], way=way)
