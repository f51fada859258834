"""Skip connections to several stages of one rank: sent to it once, and bit by bit what threads compute."""

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipework import Mesh, pop, skippable, stash
from pipework.distributed.transport.channel import Channel
from tests.distributed.together.alike import both, of_all_ranks, square, train_alike
from tests.jobs import runs_on

WIDTH, ROWS, CHUNKS = 5, 6, 3
TENSOR = ROWS // CHUNKS * WIDTH * 4  # bytes of a micro-batch's residual


@skippable(stash=["residual"])
class First(nn.Linear):
    def forward(self, x: Tensor) -> Any:
        y = torch.tanh(super().forward(x))
        yield stash("residual", y)
        return 2 * y


@skippable(pop=["residual"])
class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.mix = nn.Parameter(torch.rand(()))

    def forward(self, x: Tensor) -> Any:
        residual = yield pop("residual")
        return torch.tanh(self.linear(x)) + self.mix * residual


# Which stages pop, and how many residuals a micro-batch sends from rank to rank as values and as gradients. Gradients
# go from the last stage that pops through all others to the first.
@pytest.mark.parametrize(
    ("schedule", "popping", "checkpoint", "values", "gradients"),
    [
        ("interleaved-1f1b", [1, 3], "never", 1, 1),
        ("interleaved-1f1b", [1, 2, 3], "always", 1, 3),
        ("looped-bfs", [1, 3], "always", 1, 1),
        ("zb-v", [1, 2], "never", 1, 1),
        ("zb-v", [1, 2, 3], "never", 1, 2),
    ],
)
@runs_on(2)
def test_a_skip_is_sent_once_to_a_rank(
    mesh: Mesh,
    schedule: str,
    popping: list[int],
    checkpoint: str,
    values: int,
    gradients: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    send, sent = Channel.send, Counter()

    def counting(self: Channel, address: Any, tensors: Any, around: Any) -> None:
        if " skip " in address[0]:
            sent[address[0][0]] += sum(0 if each is None else each.nbytes for each in tensors)
        send(self, address, tensors, around)

    monkeypatch.setattr(Channel, "send", counting)
    model = nn.Sequential(
        First(WIDTH, WIDTH), *(Block() if stage in popping else nn.Linear(WIDTH, WIDTH) for stage in (1, 2, 3))
    )
    pipes = both(model, mesh, CHUNKS, checkpoint, balance=[1] * 4, schedule=schedule, loss_fn=square)
    train_alike(pipes, torch.randn(ROWS, WIDTH), target=torch.randn(ROWS, WIDTH))
    expected = {"F": values * CHUNKS * TENSOR, "B": gradients * CHUNKS * TENSOR}
    assert sum(of_all_ranks(sent), Counter()) == expected
