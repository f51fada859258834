"""Skip connections to several stages of one rank: sent to it once, and bit by bit what threads compute."""

import contextlib
import copy
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipework import Mesh, Pipe, pop, skippable, stash
from pipework.distributed.transport.channel import Channel
from tests.exactness.test_random_skips import APART, RETURNED, check

Run = Callable[..., list[Any]]

WIDTH, ROWS, CHUNKS = 5, 6, 3
TENSOR = ROWS // CHUNKS * WIDTH * 4  # bytes of a micro-batch's residual


@skippable(stash=["residual"])
class First(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Any:
        y = torch.tanh(self.linear(x))
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


def distance(output: Tensor, target: Tensor) -> Tensor:
    return ((output - target) ** 2).mean()


def sent_bytes(counted: Counter[str]) -> Any:
    """Counts the bytes of skips from now on, by the kind of the message."""
    send = Channel.send

    def counting(self: Channel, address: Any, tensors: Any, around: Any) -> None:
        if " skip " in address[0]:
            counted[address[0][0]] += sum(0 if each is None else each.nbytes for each in tensors)
        send(self, address, tensors, around)

    return counting


def train(mesh: Mesh, schedule: str, popping: list[int], checkpoint: str) -> dict[str, int]:
    torch.manual_seed(0)
    blocks = [Block() if stage in popping else nn.Linear(WIDTH, WIDTH) for stage in range(1, 4)]
    model = nn.Sequential(First(), *blocks)
    options: dict[str, Any] = {"balance": [1] * 4, "schedule": schedule, "loss_fn": distance}
    threads = Pipe(copy.deepcopy(model), CHUNKS, checkpoint, devices=["cpu"] * 2, **options)
    pipe = Pipe(model, CHUNKS, checkpoint, mesh=mesh, **options)
    counted: Counter[str] = Counter()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Channel, "send", sent_bytes(counted))
        x, y = torch.randn(ROWS, WIDTH), torch.randn(ROWS, WIDTH)
        pipe(x, target=y).backward()
        threads(x, target=y).backward()
    expected = dict(threads.named_parameters())
    for name, parameter in pipe.named_parameters():
        assert torch.equal(parameter.grad, expected[name].grad), name
    return dict(counted)


# Which stages pop, and how many residuals a micro-batch sends from rank to rank as values and as gradients. Gradients
# go from the last stage that pops through all others to the first.
CASES = [
    pytest.param("interleaved-1f1b", [1, 3], "never", 1, 1),
    pytest.param("interleaved-1f1b", [1, 2, 3], "always", 1, 3, marks=pytest.mark.thorough),
    pytest.param("looped-bfs", [1, 3], "always", 1, 1, marks=pytest.mark.thorough),
    pytest.param("zb-v", [1, 2], "never", 1, 1, marks=pytest.mark.thorough),
    pytest.param("zb-v", [1, 2, 3], "never", 1, 2, marks=pytest.mark.thorough),
]


def random_models(mesh: Mesh, seeds: list[int]) -> int:
    """Checks models on all ranks together; returns how many of them have layers for so many stages."""
    checked = 0
    for seed in seeds:
        for kinds in (APART, RETURNED):
            with contextlib.suppress(pytest.skip.Exception):
                check(seed, kinds)
                checked += 1
    return checked


THOROUGH = [
    *(pytest.param(ranks, range(14, 34), marks=pytest.mark.thorough) for ranks in (2, 3, 4)),
    *(pytest.param(ranks, range(34, 100), marks=pytest.mark.slow) for ranks in (2, 3, 4)),
]


@pytest.mark.parametrize(("ranks", "seeds"), [(2, range(2)), *THOROUGH], ids=str)
def test_random_models_are_bitwise_equal_to_the_plain_one(on_ranks: Run, ranks: int, seeds: range) -> None:
    counts = on_ranks(ranks, random_models, seeds=list(seeds), patience=300)
    assert counts[0] > len(seeds) / 2
    assert counts == counts[:1] * ranks


@pytest.mark.parametrize(("schedule", "popping", "checkpoint", "values", "gradients"), CASES)
def test_a_skip_is_sent_once_to_a_rank(
    on_ranks: Run, schedule: str, popping: list[int], checkpoint: str, values: int, gradients: int
) -> None:
    sent = map(Counter, on_ranks(2, train, schedule=schedule, popping=popping, checkpoint=checkpoint))
    assert sum(sent, Counter()) == {"F": values * CHUNKS * TENSOR, "B": gradients * CHUNKS * TENSOR}
