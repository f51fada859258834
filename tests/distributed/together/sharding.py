"""Small layers that are sharded over dimensions of a mesh, and what the whole model makes of the same data."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional as F

from pipework import Pipe
from pipework.testing import reference_step
from tests.distributed.together.alike import whole

WIDTH, CHUNKS = 8, 4
PLAN: dict[str, Any] = {"up": ColwiseParallel(), "down": RowwiseParallel()}


class Block(nn.Module):
    """A feed-forward block of a transformer."""

    def __init__(self, hidden: int = 16, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, hidden), nn.Linear(hidden, WIDTH)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.down(F.gelu(self.up(self.norm(x)))))


def blocks(mesh: Any = None, seed: int = 0) -> nn.Sequential:
    """Four blocks, which are tensor parallel if a mesh is given."""
    torch.manual_seed(seed)
    layers = [Block() for _ in range(4)]
    for layer in layers if mesh is not None else ():
        parallelize_module(layer, mesh, PLAN)
    return nn.Sequential(*layers)


def data(seed: int = 7, rows: int = 8) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, WIDTH, generator=generator), torch.randn(rows, WIDTH, generator=generator)


def mean_gradients(
    seeds: Sequence[int], make: Callable[[], nn.Module] = blocks, chunks: int = CHUNKS
) -> dict[str, Tensor]:
    """The mean of the gradients that the whole model gets from several mini-batches."""
    total: dict[str, Tensor] = {}
    for seed in seeds:
        torch.manual_seed(0)
        model = make()
        reference_step(model, *data(seed), F.mse_loss, chunks=chunks, key=0)
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None
            total[name] = total.get(name, torch.zeros(())) + parameter.grad / len(seeds)
    return total


def norm_of(gradients: dict[str, Tensor]) -> Tensor:
    return torch.linalg.vector_norm(torch.stack([each.norm() for each in gradients.values()]))


def close(pipe: Pipe, wanted: dict[str, Tensor]) -> None:
    """Sharded layers add in another order than whole ones."""
    for name, parameter in pipe.named_parameters():
        torch.testing.assert_close(whole(parameter.grad), wanted[name], rtol=1e-5, atol=1e-6)
