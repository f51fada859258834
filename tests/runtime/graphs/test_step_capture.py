"""Steps that are captured action by action: equal to eager ones, and what cannot be captured is named."""

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from pipework import Pipe, torch_private
from pipework.runtime.device import Clock
from tests.runtime.graphs.recorded import _Recorder

pytestmark = pytest.mark.usefixtures("recorded_graphs")


def blocks(count: int = 4) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 6), nn.GELU(), nn.Dropout(0.2)) for _ in range(count))
    )


def pair(layers: nn.Sequential, how: Any = True, **options: Any) -> list[Pipe]:
    """A pipe of a copy without graphs, and one with them."""
    options = {"chunks": 3, "loss_fn": mse_loss, "devices": ["cpu"] * 2, "schedule": "1f1b"} | options
    return [Pipe(copy.deepcopy(layers), **options, graphs=graphs) for graphs in (False, how)]


def trained_alike(pipes: list[Pipe], steps: int = 8, rows: int = 6) -> None:
    """Trains both with the same data and seeds, and compares losses, gradients and buffers bitwise."""
    optimizers = [torch.optim.Adam(pipe.parameters(), 0.01) for pipe in pipes]
    for step in range(steps):
        torch.manual_seed(step)
        x, y = torch.randn(rows, 6), torch.randn(rows, 6)
        losses = []
        for pipe, optimizer in zip(pipes, optimizers, strict=True):
            torch.manual_seed(100 + step)
            losses.append(pipe(x, target=y))
            losses[-1].backward()
            optimizer.step()
        assert torch.equal(*losses)
        equal(pipes)
        for optimizer in optimizers:
            optimizer.zero_grad()


def equal(pipes: list[Pipe]) -> None:
    plain, captured = pipes
    for (name, one), other in zip(plain.named_parameters(), captured.parameters(), strict=True):
        assert (one.grad is None) == (other.grad is None), name
        assert one.grad is None or torch.equal(one.grad, other.grad), name
    for (name, one), other in zip(plain.named_buffers(), captured.buffers(), strict=True):
        assert torch.equal(one, other), name


@pytest.mark.parametrize("checkpoint", ["never", "always"])
@pytest.mark.parametrize("schedule", ["gpipe", "interleaved-1f1b", "zb-h1", "zb-v"])
def test_a_captured_step_is_the_eager_one(schedule: str, checkpoint: str) -> None:
    pipes = pair(blocks(), schedule=schedule, checkpoint=checkpoint)
    trained_alike(pipes)
    assert pipes[1].graphs is not None
    assert (pipes[1].graphs.captured, pipes[1].graphs.replayed, pipes[1].graphs.eager) == (1, 3, 4)


class Waits(nn.Module):
    """Waits for its device."""

    def forward(self, x: Tensor) -> Tensor:
        return x * x.sum().item()


def test_a_layer_that_waits_is_named() -> None:
    pipe = pair(nn.Sequential(nn.Linear(6, 6), Waits(), nn.Linear(6, 6)), balance=[1, 2])[1]
    x, y = torch.randn(6, 6), torch.randn(6, 6)
    for _ in range(4):
        pipe(x, target=y).backward()
    with pytest.raises(RuntimeError, match="capturing") as caught:
        pipe(x, target=y)
    notes = " ".join(caught.value.__notes__)
    assert "in layer '1' (Waits)" in notes
    assert "stage 1, micro-batch 0, action F" in notes
    assert "cannot be captured as a graph: its layers wait for the device" in notes


def test_auto_goes_on_in_the_same_step() -> None:
    layers = nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.3), Waits(), nn.Dropout(0.3), nn.Linear(6, 6))
    plain, _ = pair(layers, balance=[2, 3])
    auto = Pipe(
        copy.deepcopy(layers), 3, balance=[2, 3], devices=["cpu"] * 2, schedule="1f1b", loss_fn=mse_loss, graphs="auto"
    )
    with pytest.warns(UserWarning, match="the pipe goes on without graphs: .*capturing.*layer '2' \\(Waits\\)\\)$"):
        trained_alike([plain, auto])
    assert auto.graphs is not None
    assert (auto.graphs.captured, auto.graphs.replayed) == (0, 0)


class Marked(Tensor):
    """A tensor of which graphs make no copies."""


class Marks(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.as_subclass(Marked)


@pytest.mark.parametrize("mark", [(), (Marks(),)], ids=["input", "message"])
def test_what_graphs_cannot_copy_ends_the_capture(mark: tuple[nn.Module, ...]) -> None:
    layers = nn.Sequential(nn.Linear(6, 6), *mark, nn.Linear(6, 6))
    torch.manual_seed(0)
    x, y = torch.randn(6, 6), torch.randn(6, 6)
    given = x if mark else x.as_subclass(Marked)
    plain, refusing = pair(layers, balance=[1 + len(mark), 1])
    _, auto = pair(layers, "auto", balance=[1 + len(mark), 1])
    for _ in range(4):
        for pipe in (plain, refusing, auto):
            pipe(given, target=y).backward()
    with pytest.raises(TypeError, match="Marked") as caught:
        refusing(given, target=y)
    assert "leave graphs= out" in " ".join(caught.value.__notes__)
    plain(given, target=y).backward()
    with pytest.warns(UserWarning, match="the pipe goes on without graphs: .*Marked"):
        auto(given, target=y).backward()
    equal([plain, auto])


class Counted(nn.Module):
    """A deferred batch norm, and then what a capture may refuse."""

    def __init__(self, waits: bool) -> None:
        super().__init__()
        self.norm, self.inner, self.waits = nn.BatchNorm1d(6), nn.Linear(6, 6), waits

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.inner(self.norm(x))
        return y * y.detach().sum().item() if self.waits else y


@pytest.mark.parametrize("waits", [False, True])
def test_a_forward_that_begins_once_more_leaves_no_moments_and_no_casts(waits: bool) -> None:
    layers = nn.Sequential(nn.Linear(6, 6), *(Counted(False) for _ in range(3)), Counted(waits), nn.Linear(6, 6))
    options = {"balance": [1, 5], "devices": ["cpu"], "deferred_batch_norm": True}
    pipes = pair(layers, "auto", schedule="interleaved-1f1b", chunks=2, **options)
    with torch.autocast("cpu", torch.bfloat16), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trained_alike(pipes, rows=8)
    assert pipes[1].graphs is not None
    assert pipes[1].graphs.captured == (not waits)


def test_hooks_on_all_modules_are_called_in_each_step() -> None:
    pipe = pair(blocks())[1]
    called: list[nn.Module] = []
    counts = []
    with nn.modules.module.register_module_forward_pre_hook(lambda module, given: called.append(module)):
        for _ in range(6):
            called.clear()
            pipe(torch.randn(6, 6), target=torch.randn(6, 6)).backward()
            counts.append(len(called))
    assert len({*counts}) == 1
    assert pipe.graphs is not None
    assert "hooks on all modules" in pipe.graphs.why


class Nested(nn.Module):
    """Calls a pipe."""

    def __init__(self) -> None:
        super().__init__()
        self.pipes = [Pipe(nn.Sequential(nn.Linear(6, 6)), devices=["cpu"])]

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            y: Tensor = self.pipes[0](x)
        return x + y


def test_a_layer_that_calls_a_pipe_is_refused() -> None:
    pipe = pair(nn.Sequential(nn.Linear(6, 6), Nested(), nn.Linear(6, 6)))[1]
    x, y = torch.randn(6, 6), torch.randn(6, 6)
    for _ in range(4):
        pipe(x, target=y).backward()
    with pytest.raises(RuntimeError, match="a layer calls a pipe while it is captured"):
        pipe(x, target=y)


def test_no_time_is_taken_inside_of_a_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a device it would be an event of the graph, which nobody can wait for."""
    pipe = pair(blocks())[1]
    x, y = torch.randn(6, 6), torch.randn(6, 6)
    inside = []
    now = Clock.now

    def looking(clock: Clock, stream: Any = None) -> Any:
        inside.append(any(isinstance(mode, _Recorder) for mode in torch_private.modes()))
        return now(clock)

    monkeypatch.setattr(Clock, "now", looking)
    with pipe.record():
        for _ in range(6):
            pipe(x, target=y).backward()
    assert pipe.graphs is not None
    assert pipe.graphs.captured == 1
    assert inside
    assert not any(inside)


def test_a_stage_that_is_recomputed_for_the_first_time_is_captured() -> None:
    """Values are compared in the first recomputations of a stage, and in a capture there are none."""
    layers = nn.Sequential(*(nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Tanh()) for _ in range(4)))
    layers[0][1].register_buffer("large", torch.zeros(20_000))
    pipes = pair(layers, checkpoint="always")
    for pipe in pipes:
        pipe.train()
        for layer in list(pipe.children())[:2]:
            layer.eval()
    trained_alike(pipes, 5)
    for pipe in pipes:
        pipe.train()
    trained_alike(pipes, 3)
    assert pipes[1].graphs is not None
    assert pipes[1].graphs.captured == 2


@pytest.mark.parametrize("schedule", ["zb-h1", "zb-v"])
def test_a_stage_that_defers_nothing_is_replayed(schedule: str) -> None:
    layers = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Dropout(0.2), nn.Linear(6, 6))
    pipes = pair(layers, schedule=schedule, balance=[1, 1, 1, 1] if schedule == "zb-v" else [1, 3])
    for pipe in pipes:
        pipe[3].requires_grad_(False)
    trained_alike(pipes)
    assert pipes[1].graphs is not None
    assert pipes[1].graphs.replayed == 3


class NoMemory(nn.Module):
    """Finds no memory in a capture."""

    def forward(self, x: Tensor) -> Tensor:
        if any(isinstance(mode, _Recorder) for mode in torch_private.modes()):
            raise torch.OutOfMemoryError("no memory")
        return x


def test_no_memory_is_no_fault_of_the_layers() -> None:
    pipe = pair(nn.Sequential(nn.Linear(6, 6), NoMemory(), nn.Linear(6, 6)))[1]
    x, y = torch.randn(6, 6), torch.randn(6, 6)
    for _ in range(4):
        pipe(x, target=y).backward()
    with pytest.raises(torch.OutOfMemoryError) as caught:
        pipe(x, target=y)
    assert "cannot be captured" not in " ".join(caught.value.__notes__)


@pytest.mark.parametrize("graphs", ["on", "yes", 1, None, ("auto", "no")])
def test_another_value_is_refused(graphs: Any) -> None:
    with pytest.raises(ValueError, match="graphs is True, False, or one or several of 'auto' and 'hooks': got"):
        Pipe(nn.Sequential(nn.Linear(2, 2)), devices=["cpu"], graphs=graphs)


def test_a_device_without_graphs_is_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    with pytest.raises(ValueError, match="worker 0 computes on cpu, which has no graphs"):
        Pipe(nn.Sequential(nn.Linear(2, 2)), devices=["cpu"], graphs=True)
