"""The pipe inside of an adapter splits each tensor as `torch.chunk` does."""

import pytest
import torch
from torch import Tensor, nn

from pipework.compat.adapted_pipe import AdaptedPipe, TupleKeeping, Whole, sequence
from pipework.model.sequential import PipeSequential


class Sizes(nn.Module):
    """Keeps the number of rows of each input."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[int, ...]] = []

    def forward(self, x: Tensor, *others: Tensor) -> Tensor:
        self.seen.append((len(x), *map(len, others)))
        return x


def pipe_of(layer: nn.Module, chunks: int) -> AdaptedPipe:
    return AdaptedPipe(PipeSequential(layer), chunks, "never", devices=["cpu"])


def test_nine_rows_in_eight_chunks_are_five_micro_batches() -> None:
    layer = Sizes()
    pipe_of(layer, 8)(torch.ones(9, 1))
    assert layer.seen == [(2,), (2,), (2,), (2,), (1,)]


def test_tensors_may_have_different_rows_if_the_pieces_are_as_many() -> None:
    layer = Sizes()
    pipe_of(layer, 2)(torch.ones(4, 1), torch.ones(6, 1), Whole(torch.ones(5, 1)))
    assert layer.seen == [(2, 3, 5), (2, 3, 5)]
    with pytest.raises(RuntimeError, match="different number of chunks produced for inputs: 2 and 1"):
        pipe_of(layer, 2)(torch.ones(4, 1), torch.ones(1, 1))


def test_the_output_of_one_micro_batch_is_a_copy() -> None:
    x = torch.ones(1, 2)
    pipe_of(nn.Identity(), 1)(x).zero_()
    assert x.tolist() == [[1.0, 1.0]]


def test_a_sequence_of_another_class_has_the_same_layers_and_mode() -> None:
    module = nn.Sequential(nn.ReLU()).eval()
    other = sequence(TupleKeeping, module)
    assert other[0] is module[0]
    assert not other.training
