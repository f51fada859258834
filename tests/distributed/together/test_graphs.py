"""Ranks that capture and replay by themselves: other ranks get the same messages, and all the same numbers."""

import contextlib
import copy
import itertools
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.utils.flop_counter import FlopCounterMode

from pipework import Mesh, Pipe
from pipework.runtime.graphs import captured_steps
from tests.distributed.together.alike import Tied, of_all_ranks, other_gradients, refused, square
from tests.helpers import Pop, Stash
from tests.jobs import runs_on
from tests.runtime.graphs.recorded import RecordedGraph, RecordedGraphs

WIDTH = 6
SCHEDULES = ("gpipe", "1f1b", "interleaved-1f1b", "zb-h1", "zb-v", "dualpipe-v")


def recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    """See the fixture of this name in tests/conftest.py, which other processes do not have."""
    monkeypatch.setattr(captured_steps, "can_capture", lambda device: True)
    monkeypatch.setattr(captured_steps, "Graphs", lambda device: RecordedGraphs())


def block() -> nn.Sequential:
    return nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.Dropout(0.2))


def with_skips_and_ties() -> nn.Sequential:
    """A skip from the first stage to the last one, and a weight that both have."""
    weight = nn.Parameter(torch.randn(WIDTH, WIDTH))
    first, last = nn.Sequential(Tied(weight), block()), nn.Sequential(Tied(weight), nn.BatchNorm1d(WIDTH))
    return nn.Sequential(first, Stash(), *(block() for _ in range(4)), Pop(), last)


def pair(layers: nn.Sequential, mesh: Mesh, how: Any = True, **options: Any) -> tuple[Pipe, Pipe]:
    """A pipe of a copy without graphs, and one with them."""
    options = {"chunks": 3, "loss_fn": square, "schedule": "1f1b", "mesh": mesh} | options
    return Pipe(copy.deepcopy(layers), **options), Pipe(layers, **options, graphs=how)


def counts(pipe: Pipe) -> list[int]:
    """How many steps were captured, replayed and run without."""
    assert pipe.graphs is not None
    return [*pipe.graphs[:3]]


def alike(
    pipes: tuple[Pipe, Pipe],
    steps: int = 7,
    data: Callable[[int], tuple[Tensor, Any]] = lambda step: (torch.randn(6, WIDTH), torch.randn(6, WIDTH)),
    before: Callable[[Pipe, int], None] = lambda pipe, step: None,
    calls: int = 1,
    **keywords: Any,
) -> None:
    """Trains both with the same data and seeds: losses, outputs, gradients and buffers are bitwise the same."""
    optimizers = [torch.optim.Adam([{"params": [*pipe.parameters()]}], 0.01) for pipe in pipes]
    for step in range(steps):
        results = []
        for pipe in pipes:
            before(pipe, step)
            torch.manual_seed(100 * pipe.data_parallel_rank + step)
            for _ in range(calls):
                x, y = data(step)
                loss, output = pipe(x, target=y, return_output=True, **keywords)
                (loss * 0.5).backward()
                results.append([loss, output, x.grad])
            results[-1].append(pipe.clip_grad_norm_(0.1))
        assert other_gradients(*pipes) == [], step
        for one, other in zip(results[:calls], results[calls:], strict=True):
            for mine, theirs in zip(one, other, strict=True):
                assert mine is theirs is None or torch.equal(mine, theirs), step
        for one, other in zip(pipes[0].buffers(), pipes[1].buffers(), strict=True):
            assert torch.equal(one, other)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


QUICK = {("gpipe", "never"), ("interleaved-1f1b", "always"), ("zb-h1", "always"), ("zb-v", "never")}
TIERS = pytest.mark.slow, pytest.mark.thorough


@pytest.mark.parametrize(
    ("schedule", "checkpoint", "ranks"),
    [
        pytest.param(*each, ranks, marks=() if each in QUICK and ranks == 2 else TIERS[each in QUICK])
        for each in itertools.product(SCHEDULES, ("never", "always"))
        for ranks in (2, 4)
    ],
)
@runs_on()
def test_a_captured_step_is_the_eager_one(
    mesh: Mesh, schedule: str, checkpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded(monkeypatch)
    pipes = pair(with_skips_and_ties(), mesh, schedule=schedule, checkpoint=checkpoint)
    alike(pipes)
    assert of_all_ranks(counts(pipes[1])) == [[1, 2, 4]] * len(mesh.ranks)


class Widening(nn.Linear):
    """Returns another number of columns if it is told so, which the next layer folds."""

    wide = False
    factor = 1.0

    def forward(self, x: Tensor) -> tuple[Tensor, float]:
        y = super().forward(x)
        return (torch.cat([y, y.tanh()], -1), 1.0) if self.wide else (y, self.factor)


class Folding(nn.Linear):
    def forward(self, x: Tensor, factor: float) -> Tensor:
        return super().forward(x.unflatten(-1, (-1, WIDTH)).sum(-2)) * factor


def chain(*layers: nn.Module) -> nn.Sequential:
    return nn.Sequential(block(), *(layers or (block(), block())), block())


def widening() -> nn.Sequential:
    return chain(Widening(WIDTH, WIDTH), Folding(WIDTH, WIDTH))


def thaw(pipe: Pipe, step: int) -> None:
    """The layers of the first rank: at first nothing requires a gradient that leaves it."""
    for name, parameter in pipe.named_parameters():
        parameter.requires_grad_(step > 6 or int(name[0]) > 1)


def widen(pipe: Pipe, step: int) -> None:
    for module in pipe.modules():
        if isinstance(module, Widening):
            module.wide, module.factor = step in (7, 8), 1.0 if step < 10 else 0.5


def drop_more(pipe: Pipe, step: int) -> None:
    if pipe.is_last:
        for module in pipe.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.2 if step < 7 else 0.4


def evaluate(pipe: Pipe, step: int) -> None:
    pipe.eval()
    with torch.no_grad():
        pipe(torch.randn(6, WIDTH))
        pipe(torch.randn(6, WIDTH), target=torch.randn(6, WIDTH))
    pipe.train()


def rows(*several: int, width: tuple[int, ...] = (WIDTH,)) -> Callable[[int], tuple[Tensor, Tensor]]:
    def data(step: int) -> tuple[Tensor, Tensor]:
        shape = several[step % len(several)], *width
        return torch.randn(shape), torch.randn(shape)

    return data


def lengths(step: int) -> tuple[Tensor, Tensor]:
    shape = 6, 3 + step % 2, WIDTH
    return torch.randn(shape), torch.randn(shape)


def wanted(step: int) -> tuple[Tensor, Tensor]:
    return torch.randn(6, WIDTH, requires_grad=True), torch.randn(6, WIDTH)


def precise(step: int) -> tuple[Tensor, Tensor]:
    return torch.randn(6, WIDTH), torch.randn(6, WIDTH, dtype=torch.float64 if step % 2 else torch.float32)


CASES: dict[str, dict[str, Any]] = {
    "gradients of inputs, everywhere": {"data": wanted},
    "outputs everywhere": {"outputs": "all"},
    "two calls before a step": {"calls": 2},
    "an odd last batch": {"data": rows(6, 6, 5), "steps": 14},
    "other lengths": {"data": lengths, "steps": 12},
    "targets of another dtype": {"data": precise, "steps": 12},
    "frozen layers": {"before": thaw, "steps": 12},
    "a probability on the last rank": {"before": drop_more, "steps": 10},
    "another form between ranks": {"layers": widening, "before": widen, "steps": 12},
    "evaluation": {"before": evaluate},
}


@pytest.mark.parametrize("case", CASES)
@runs_on(2)
def test_all_that_may_change(mesh: Mesh, case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    recorded(monkeypatch)
    given = dict(CASES[case])
    pipes = pair(given.pop("layers", chain)(), mesh, balance=[2, 2])
    alike(pipes, **given)
    assert counts(pipes[1])[1] > 1


@pytest.mark.parametrize("schedule", ["1f1b", "zb-v"])
@runs_on(4, dp=2)
def test_replicas(mesh: Mesh, schedule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    recorded(monkeypatch)
    pipes = pair(with_skips_and_ties(), mesh, schedule=schedule)
    alike(pipes, 9, rows(6, 6, 6, 6, 6, 6, 6, 9))
    assert of_all_ranks(counts(pipes[1])) == [[1, 3, 5]] * 4


class Waits(nn.Linear):
    """Waits for its device, and returns what it has found beside a tensor."""

    def forward(self, x: Tensor) -> tuple[Tensor, float]:
        return super().forward(x), x.sum().item()


@pytest.mark.parametrize("waits", [0, 1])
@runs_on(2)
def test_all_ranks_go_on_without_graphs_if_one_does(mesh: Mesh, waits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its messages may have other values in each step, which a graph of the next rank would not read."""
    recorded(monkeypatch)
    found = [Waits(WIDTH, WIDTH), Folding(WIDTH, WIDTH)]
    layers = nn.Sequential(*([block(), *found, block()] if waits == 0 else [block(), block(), *found]))
    pipes = pair(layers, mesh, "auto", balance=[2, 2])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        alike(pipes)
    told = [str(each.message) for each in caught if "goes on without graphs" in str(each.message)]
    assert len(told) == (mesh.rank == waits)
    assert of_all_ranks(counts(pipes[1])) == [[int(rank != waits), 0, 7 - (rank != waits)] for rank in (0, 1)]
    assert pipes[1].graphs is not None
    assert (f"worker {waits} goes on" in pipes[1].graphs.why) == (mesh.rank != waits)


@runs_on(2)
def test_a_replay_refuses_another_value_beside_tensors(mesh: Mesh, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first rank captures nothing, since there is a mode around its calls."""
    recorded(monkeypatch)
    layers = chain(Waits(WIDTH, WIDTH), Folding(WIDTH, WIDTH))
    pipe = pair(layers, mesh, balance=[2, 2])[1]
    x, y = torch.randn(2, 6, WIDTH)
    with FlopCounterMode(display=False) if pipe.is_first else contextlib.nullcontext():
        for _ in range(5):
            torch.manual_seed(0)
            pipe(x, target=y).backward()
        with refused("another form of message 'F' than its graph was captured for", RuntimeError):
            pipe(x + 1, target=y)


@pytest.mark.parametrize("replays", [False, True])
@runs_on(2)
def test_a_rank_that_fails_is_named(mesh: Mesh, replays: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the middle of a step that is captured or replayed: in its second replay."""
    recorded(monkeypatch)
    pipe = pair(chain(), mesh, balance=[2, 2])[1]
    x, y = torch.randn(2, 6, WIDTH)
    for _ in range(6 if replays else 4):
        pipe(x, target=y).backward()
    assert counts(pipe) == ([1, 1, 4] if replays else [0, 0, 4])
    replay, left = RecordedGraph.replay, [1]

    def failing(graph: RecordedGraph) -> None:
        if not left:
            raise RuntimeError("this launch has failed")
        left.pop()
        replay(graph)

    if pipe.is_last:
        monkeypatch.setattr(RecordedGraph, "replay", failing)
    with refused("this launch has failed", RuntimeError) as caught:
        pipe(x, target=y)
    if pipe.is_first:
        assert "rank 1 (stage 1) failed in stage 1, micro-batch 0, action B" in str(caught.value)
    with refused("this launch has failed", RuntimeError):
        pipe(x, target=y)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.LSTM(WIDTH, WIDTH, 2, dropout=0.1, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x[:, None])[0][:, 0]


def sharded(mesh: Mesh) -> nn.Module:
    return fully_shard(nn.Linear(WIDTH, WIDTH), mesh=mesh.device_mesh["dp"])


REFUSED: dict[str, tuple[Callable[[Mesh], nn.Module], str]] = {
    "recurrent": (lambda mesh: Recurrent(), "layer '3' has a recurrent module with dropout"),
    "fully_shard": (sharded, "layer '3' has DTensors"),
}


@pytest.mark.parametrize("kind", REFUSED)
@runs_on(2)
def test_layers_that_are_refused(mesh: Mesh, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the first step: on the rank that has them, of which the other one hears."""
    recorded(monkeypatch)
    layer, words = REFUSED[kind]
    layers = nn.Sequential(block(), block(), block(), layer(mesh))
    for how in ("auto", True):
        pipe = Pipe(layers, 2, mesh=mesh, balance=[2, 2], loss_fn=square, graphs=how)
        of_all_ranks(None)  # else a slow rank may hear of the other one's error while it still makes the pipe
        x = torch.randn(6, WIDTH)
        with refused(words) if how is True else contextlib.nullcontext():
            pipe(x, target=x)


@runs_on(2)
def test_errors_of_all_ranks_and_recordings(mesh: Mesh, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error before the work leaves captured steps as they are, and so does a recording."""
    recorded(monkeypatch)
    pipes = pair(chain(), mesh, balance=[2, 2])
    alike(pipes, 5)
    for pipe in pipes:
        with pytest.raises(ValueError, match="got no target"):
            pipe(torch.randn(6, WIDTH))
    alike(pipes, 1)
    with pipes[1].record() as recording:
        alike(pipes, 2)
    assert {each.action.kind for each in recording.timeline().intervals} >= {"F", "B"}
    assert of_all_ranks(counts(pipes[1])) == [[1, 3, 4]] * 2
