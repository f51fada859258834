"""Statistics that other pipelines counted twice, or never."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from pipework import Pipe
from pipework.model.checkpoint import is_recomputing
from tests.conftest import WAYS
from tests.ranks import held

CHECKPOINT_MODES = ("never", "except_last", "always")
# Rows and chunks: as many micro-batches as there are rows at most.
SIZES = {(6, 4): 4, (3, 4): 3, (2, 4): 2, (1, 4): 1, (5, 8): 5, (7, 3): 3}


def model(momentum: float | None = 0.1) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv1d(2, 4, 3), nn.BatchNorm1d(4, momentum=momentum), nn.ReLU(), nn.Conv1d(4, 2, 3), nn.Flatten()
    )


class Count(nn.Module):
    def __init__(self, recomputed: list[int]) -> None:
        super().__init__()
        self.recomputed = recomputed

    def forward(self, x: Tensor) -> Tensor:
        if is_recomputing():
            self.recomputed.append(len(x))
        return x


@pytest.mark.filterwarnings("ignore:each mini-batch so far has one row")
@pytest.mark.parametrize(("rows", "chunks"), SIZES)
@pytest.mark.parametrize("checkpoint", CHECKPOINT_MODES)
@pytest.mark.parametrize("momentum", [0.1, None])
def test_12_deferred_statistics_with_fewer_micro_batches_than_asked_for(
    momentum: float | None, checkpoint: str, rows: int, chunks: int
) -> None:
    """Six rows cannot make four micro-batches of equal size, so there were three; but the statistics were committed
    after the fourth, which never came.
    """
    whole = model(momentum).double()
    pipe = WAYS["outside"].pipe(whole, chunks, checkpoint, True, balance=[1, 4])
    for step in range(1, 4):
        x = torch.randn(rows, 2, 8, dtype=torch.float64)
        with torch.no_grad():
            whole(x)
        pipe(x).square().sum().backward()
        here = dict(pipe.named_buffers())
        assert here.get("1.num_batches_tracked", step) == step
        for name, expected in held(whole, pipe).named_buffers():
            torch.testing.assert_close(here[name], expected, rtol=1e-12, atol=1e-14)


@pytest.mark.one_process("a single layer")
@pytest.mark.parametrize(("rows", "chunks"), SIZES)
@pytest.mark.parametrize("checkpoint", CHECKPOINT_MODES)
def test_12_the_last_micro_batch_is_the_last_that_there_is(checkpoint: str, rows: int, chunks: int) -> None:
    """'except_last' spared the micro-batch with the highest number asked for: with fewer, all were computed twice."""
    micro_batches = SIZES[rows, chunks]
    recomputed: list[int] = []
    pipe = Pipe(nn.Sequential(nn.Conv1d(1, 1, 1), Count(recomputed)), chunks, checkpoint, balance=[2], devices=["cpu"])
    pipe(torch.randn(rows, 1, 2)).sum().backward()
    assert len(recomputed) == {"never": 0, "except_last": micro_batches - 1, "always": micro_batches}[checkpoint]


@pytest.mark.parametrize("balance", [[5], [1, 4], [2, 1, 2]], ids=str)
@pytest.mark.parametrize("checkpoint", CHECKPOINT_MODES)
@pytest.mark.parametrize("momentum", [0.1, None, 1.0])
def test_14_plain_batch_norm_counts_once(
    momentum: float | None, checkpoint: str, balance: list[int], assert_trained_alike: Callable[..., None]
) -> None:
    """The recomputation of a checkpointed micro-batch updated the running statistics for a second time, and the count
    of batches with them. Every buffer equals that of the un-pipelined model after each micro-batch of three steps.
    """
    plain = model(momentum)
    pipe = WAYS["outside"].pipe(plain, 4, checkpoint, balance=balance)
    assert_trained_alike(plain, pipe, [(torch.randn(rows, 2, 8),) for rows in (8, 7, 3)])
    assert plain[1].num_batches_tracked == 4 + 4 + 3
