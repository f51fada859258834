"""Models of many kinds, whose steps are captured as graphs, end as the un-pipelined model does.

Each has a step without graphs, then one that is captured, then replays with new data and weights. A sample of the grid
is run each time, the whole of it where slow tests are asked for.
"""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipework import PipeSequential, pop, skippable, stash
from pipework.skip import Namespace
from tests.exactness import test_random_models as random_models
from tests.exactness.test_grid import BALANCES, CHECKPOINT_MODES, CHUNKS, MODELS, ROWS, WAYS, convolutional, forgetful
from tests.tiers import sampled

pytestmark = pytest.mark.usefixtures("captured_soon")
INSIDE = WAYS[1:]
STEPS = 3


def capturable(module: nn.Sequential) -> nn.Sequential:
    """Without what waits for a device: batch norms that count, and recurrent layers that draw."""
    for each in module.modules():
        if isinstance(each, nn.BatchNorm2d):
            each.momentum = each.momentum or 0.1
        elif isinstance(each, nn.RNNBase):
            each.dropout = 0.0
    return module


@pytest.mark.parametrize(
    ("name", "way", "checkpoint", "balance", "rows", "dtype"),
    sampled(MODELS, INSIDE, CHECKPOINT_MODES, BALANCES, ROWS, (torch.float32, torch.bfloat16), each=1, whole=1),
    indirect=["way"],
)
def test_every_model(
    name: str,
    way: Any,
    checkpoint: str,
    balance: list[int],
    rows: str,
    dtype: torch.dtype,
    assert_trained_alike: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = MODELS[name]
    plain = capturable(model.make()).to(dtype)
    pipe = way.pipe(plain, CHUNKS, checkpoint, balance=balance, graphs=True)
    if name == "recurrent":  # oneDNN's tensors have no memory that a test could look at
        monkeypatch.setattr(torch.backends.mkldnn, "enabled", False)
    changes = 3 if name == "frozen-and-thawed" else 1
    batches = [tuple(tensor.to(dtype) for tensor in model.batch(ROWS[rows])) for _ in range(STEPS * changes)]
    assert_trained_alike(
        plain,
        pipe,
        batches,
        way=way,
        before_step=lambda model, step: MODELS[name].before_step(model, step // STEPS),
        evaluate=True,
    )
    assert (pipe.graphs.captured, pipe.graphs.replayed, pipe.graphs.eager) == (
        changes,
        STEPS * changes - 2 * changes,
        changes,
    )


@pytest.mark.parametrize(
    ("checkpoint", "way", "rows"), sampled(CHECKPOINT_MODES, INSIDE, ROWS, each=3, whole=0), indirect=["way"]
)
def test_deferred_batch_norm(way: Any, checkpoint: str, rows: str, assert_trained_alike: Callable[..., None]) -> None:
    module = capturable(convolutional())
    pipes = [way.pipe(module, CHUNKS, checkpoint, True, balance=[2, 3], graphs=graphs) for graphs in (False, True)]
    for pipe in pipes:
        torch.manual_seed(0)
        batches = [MODELS["convolutional"].batch(ROWS[rows]) for _ in range(STEPS)]
        assert_trained_alike(forgetful(module), pipe, batches, way=way, buffers=False, evaluate=True)
    assert pipes[1].graphs.replayed == STEPS - 2
    for expected, actual in zip(*(pipe.buffers() for pipe in pipes), strict=True):
        assert torch.equal(actual, expected)


@pytest.mark.parametrize("seeds", [[0, 1], *(pytest.param([n], marks=pytest.mark.slow) for n in range(2, 60))], ids=str)
@pytest.mark.filterwarnings("ignore:.*(is no mean over rows|batch_first|goes on without graphs):UserWarning")
def test_random_models(seeds: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers that wait for the device, such as some parametrizations, run without graphs."""
    kinds = [kind for kind in random_models.KINDS if kind.__name__ not in ("experts", "recurrent")]
    monkeypatch.setattr(random_models, "KINDS", kinds)
    for seed in seeds:
        graphs = random_models.check(seed, STEPS, graphs="auto").graphs
        assert graphs.replayed == STEPS - 2 or "capturing" in graphs.why


# Odd layers


@skippable(stash=["seen", "none"])
class Stashes(nn.Module):
    def forward(self, x: Tensor) -> Iterator[Any]:
        yield stash("seen", x * 2)
        yield stash("none", None)
        return x.relu()


@skippable(pop=["seen", "none"])
class Pops(nn.Module):
    def forward(self, x: Tensor) -> Iterator[Any]:
        seen = yield pop("seen")
        assert (yield pop("none")) is None
        return x + seen


class Splits(nn.Linear):
    """Values between stages: nested, with a view, an expanded tensor, a number and a tensor of integers."""

    def forward(self, x: Tensor) -> Any:
        y = super().forward(x)
        return {"halves": (y[:, :3], y[:, 3:].t()), "mean": y.mean(1, keepdim=True).expand(-1, 6), "n": 2}, y.argmax(1)


class Joins(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(6, 6)

    def forward(self, value: Any) -> Tensor:
        named, index = value
        left, right = named["halves"]
        return torch.cat([left, right.t()], 1) * named["mean"] + self.embedding(index) * named["n"]


class Mean(nn.Module):
    """Its gradient is expanded: all elements have one memory."""

    def forward(self, x: Tensor) -> Tensor:
        return x.mean(1, keepdim=True).expand(-1, 6)


class Now(nn.Module):
    """A parameter that only the micro-batch with the first row has a use for."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.unused = nn.Parameter(torch.ones(6)), nn.Parameter(torch.ones(6))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale if len(x) == 2 else x


def linear() -> nn.Module:
    return nn.Linear(6, 6)


def far_skips() -> list[nn.Module]:
    """They cross, and two stages pop them."""
    spaces = [Namespace(), Namespace()]
    stashes, pops = ([kind().isolate(space) for space in spaces] for kind in (Stashes, Pops))
    return [*stashes, linear(), pops[0], nn.Dropout(0.2), pops[1]]


ODD: dict[str, Callable[[], list[nn.Module]]] = {
    "none skips": lambda: [linear(), Stashes(), linear(), nn.Dropout(0.2), linear(), Pops()],
    "far skips": lambda: far_skips(),
    "nested": lambda: [linear(), nn.Tanh(), Splits(6, 6), Joins(), nn.Dropout(0.2), linear()],
    "expanded": lambda: [linear(), linear(), Mean(), nn.Dropout(0.3), Mean(), linear()],
    "some micro-batches": lambda: [linear(), Now(), linear(), Now(), nn.Dropout(0.2), linear()],
    "in place": lambda: [linear(), nn.ReLU(True), linear(), nn.Dropout(0.3, inplace=True), linear(), nn.ELU(0.5, True)],
    "without parameters": lambda: [nn.Flatten(), nn.Tanh(), linear(), linear(), nn.Dropout(0.3), nn.Softmax(1)],
    "frozen": lambda: [linear().requires_grad_(False), nn.Dropout(0.3), linear(), linear(), linear(), Mean()],
    "norm": lambda: [linear(), nn.BatchNorm1d(6), nn.Dropout(0.2), linear(), nn.BatchNorm1d(6), linear()],
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "way", "checkpoint", "rows"),
    sampled(ODD, INSIDE, CHECKPOINT_MODES, (8, 7), each=1, whole=1),
    indirect=["way"],
)
def test_odd_layers(name: str, way: Any, checkpoint: str, rows: int, assert_trained_alike: Callable[..., None]) -> None:
    torch.manual_seed(0)
    plain = PipeSequential(*ODD[name]()) if "skips" in name else nn.Sequential(*ODD[name]())
    pipe = way.pipe(plain, CHUNKS, checkpoint, balance=[2, 1, 1, 2], graphs=True)
    rows += name == "norm"  # which refuses a single row
    batches = [(torch.randn(rows, 6),) for _ in range(STEPS)]
    assert_trained_alike(plain, pipe, batches, way=way, evaluate=True)
    assert pipe.graphs.replayed == STEPS - 2
