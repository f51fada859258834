"""Activations in host memory for a while: bit by bit as without a pipe, and errors that PyTorch would raise."""

import copy
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from pipework import Pipe
from pipework.runtime.host_memory import HostMemory
from pipework.schedule import build, from_csv, to_csv, with_offload, with_recompute
from tests.conftest import Way, distance
from tests.exactness.test_grid import BALANCES, CHECKPOINT_MODES, CHUNKS, DTYPES, MODELS, ROWS, train_model, vectors
from tests.exactness.test_grid import WAYS as NAMES
from tests.exactness.test_schedules_from_csv import pipe_of, with_long_skips
from tests.exactness.test_skips import WIDTH
from tests.ranks import own_mesh
from tests.tiers import sampled


def hosts(pipe: Pipe) -> list[HostMemory]:
    return [device.host_memory for device in pipe._executor.engine_in_use().devices.values()]


def reserved(pipe: Pipe) -> int:
    """The bytes of the buffers that nothing uses."""
    return sum(host.reserved for host in hosts(pipe))


@pytest.mark.parametrize(
    ("way", "checkpoint", "name", "keep", "balance", "rows", "dtype"),
    sampled(NAMES, CHECKPOINT_MODES, MODELS, ("activations", 1, 2), BALANCES[1:], ROWS, DTYPES, each=2, whole=1),
    indirect=["way"],
)
def test_every_model(
    way: Any,
    checkpoint: str,
    name: str,
    keep: str | int,
    balance: list[int],
    rows: str,
    dtype: torch.dtype,
    assert_trained_alike: Callable[..., None],
) -> None:
    train_model(name, way, checkpoint, rows, dtype, assert_trained_alike, balance=balance, offload=keep)


class Twice(torch.autograd.Function):
    """Saves its input, its output, and one tensor twice; and has a tensor that no hook sees."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = x.exp()
        ctx.save_for_backward(x, y, y)
        ctx.beside = y.sin()
        return y

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        x, y, again = ctx.saved_tensors
        assert x.shape == y.shape
        return gradient * (y + again) * ctx.beside


class Odd(nn.Module):
    """Saves tensors of many kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.constant = torch.linspace(0.5, 1.5, 6)  # no buffer, and of all micro-batches

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x) * self.constant.to(x.device)
        number, column = y.sum(), y[:, :1].expand(-1, 6)  # 0 dimensions, and elements that share memory
        turned = y.t().exp()[::2].sin().sum(0)[:, None]  # gaps
        turning = torch.view_as_real(torch.view_as_complex(y.view(-1, 3, 2)).conj() * 1j).flatten(1)
        shifted = torch.cat([y, y], 1)[:, 1:7].tanh()  # begins beside the alignment
        memory = numpy.frombuffer(bytearray(4 * y.numel() + 4), dtype="float32", offset=4)
        foreign = torch.from_numpy(memory).view(y.shape).to(y)
        empty = (y[:0] * y[:0]).sum()
        return Twice.apply(y / 8) + column * number.cos() + turned * turning * shifted + foreign * y + empty


class InPlace(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        y = x.sigmoid()
        return torch.relu_(x * 2) * y.detach() + y


class Checkpoints(nn.Module):
    """Has a checkpoint and hooks of its own, and a graph that is dropped."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))

    def forward(self, x: Tensor) -> Tensor:
        torch.utils.checkpoint.checkpoint(self.inner, x, use_reentrant=False)
        y = torch.utils.checkpoint.checkpoint(self.inner, x.tanh(), use_reentrant=False)
        with saved_tensors_hooks(lambda tensor: tensor.detach().clone(), lambda tensor: tensor):
            y = y.cos() * y
        return y.exp().tanh()


def odd() -> nn.Sequential:
    return nn.Sequential(Odd(), InPlace(), Checkpoints(), Odd(), nn.Softmax(1), nn.Linear(6, 3))


@pytest.mark.parametrize("way", ["outside", "1f1b", "zb-h1"], indirect=True)
@pytest.mark.parametrize("checkpoint", ["never", "always"])
def test_saved_tensors_of_many_kinds(way: Way, checkpoint: str, assert_trained_alike: Callable[..., None]) -> None:
    plain = odd()
    pipe = way.pipe(plain, CHUNKS, checkpoint, balance=[1, 1, 2, 2], offload="activations")
    assert_trained_alike(plain, pipe, [vectors(8), vectors(8)], way=way)
    if own_mesh() is None and checkpoint == "never":
        assert reserved(pipe) > 0


class Block(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).tanh().exp() + x


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # of the compiler
@pytest.mark.parametrize("way", ["1f1b"], indirect=True)
def test_compiled_layers(way: Way, assert_trained_alike: Callable[..., None]) -> None:
    plain = nn.Sequential(*(nn.Sequential(Block(6, 6), nn.Linear(6, 6), nn.Tanh()) for _ in range(4)))
    pipe = way.pipe(plain, CHUNKS, "never", balance=[1, 1, 1, 1], offload="activations")
    for layer in pipe:
        layer.compile(backend="aot_eager")
    assert_trained_alike(plain, pipe, [vectors(8), vectors(8)], way=way)
    with pipe.record():
        assert_trained_alike(plain, pipe, [vectors(8)], way=way)


@pytest.mark.parametrize("count", [0, 1])
def test_a_schedule_that_was_read_from_csv_says_itself_what_moves(
    count: int, assert_trained_alike: Callable[..., None]
) -> None:
    schedule = with_offload(with_recompute(build("1f1b", workers=4, chunks=CHUNKS), count))
    schedule = from_csv(to_csv(schedule), name="own")
    plain = with_long_skips()
    pipe = pipe_of(plain, schedule, "except_last")
    ran = [[action for action in order if action.kind != "R" or count] for order in pipe.schedule().orders]
    assert ran == [list(order) for order in schedule.orders]
    batches = [(torch.randn(rows, WIDTH),) for rows in (8, 9, CHUNKS - 2)]
    assert_trained_alike(plain, pipe, batches, way=Way("gpipe", inside=True), evaluate=True)


# Of several threads one may still hold a value that it has sent, at the O of the next stage, so that fewer inputs move.
UNIFORM: dict[str, Any] = {"never": (), "always": "one_thread"}


def twins(schedule: str = "gpipe", **options: Any) -> tuple[Pipe, Pipe]:
    """A pipe with activations in host memory, and one without."""
    module = nn.Sequential(nn.Linear(6, 6), nn.GELU(), nn.Dropout(0.3), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3))
    options |= {"balance": [3, 3], "devices": ["cpu"] * 2, "schedule": schedule, "loss_fn": distance}
    pair = [Pipe(copy.deepcopy(module), CHUNKS, offload=each, **options) for each in ("activations", False)]
    return pair[0], pair[1]


def gradients(pipe: Pipe) -> list[Tensor]:
    found = [parameter.grad for parameter in pipe.parameters() if parameter.grad is not None]
    pipe.zero_grad()
    return found


def retained(pipe: Pipe, x: Tensor, y: Tensor) -> list[Tensor]:
    output = pipe(x)
    loss = distance(output, y)
    loss.backward(retain_graph=True)
    (2 * loss).backward()
    return gradients(pipe)


def several_in_flight(pipe: Pipe, x: Tensor, y: Tensor) -> list[Tensor]:
    first, second = pipe(x), pipe(2 * x)
    pipe(3 * x)  # never differentiated
    with torch.no_grad():
        pipe(4 * x)
    pipe.eval()(5 * x)
    pipe.train()
    distance(second, y).backward()
    distance(first, y).backward()
    return gradients(pipe)


def accumulated_in_autocast(pipe: Pipe, x: Tensor, y: Tensor) -> list[Tensor]:
    with torch.autocast("cpu", torch.bfloat16):
        for part in (x, 2 * x):
            pipe(part, target=y).backward()
    return gradients(pipe)


def under_hooks(pipe: Pipe, x: Tensor, y: Tensor) -> list[Tensor]:
    with torch.autograd.graph.save_on_cpu():
        distance(pipe(x), y).backward()
    return gradients(pipe)


def recorded(pipe: Pipe, x: Tensor, y: Tensor) -> list[Tensor]:
    with pipe.record():
        pipe(x, target=y).backward()
    return gradients(pipe)


@pytest.mark.one_process("it looks into the pipe")
@pytest.mark.parametrize("train", [retained, several_in_flight, accumulated_in_autocast, under_hooks, recorded])
@pytest.mark.parametrize("checkpoint", ["never", "always"])
def test_uses(train: Callable[[Pipe, Tensor, Tensor], list[Tensor]], checkpoint: str) -> None:
    x, y = torch.randn(8, 6), torch.randn(8)
    both = [None, None]
    for number, pipe in enumerate(twins(checkpoint=checkpoint, debug=UNIFORM[checkpoint])):
        torch.manual_seed(1)
        both[number] = [train(pipe, x, y) for _ in range(2)]
        sizes = reserved(pipe)
        assert train(pipe, x, y)
        assert reserved(pipe) == sizes, "all buffers came back, and none was added"
        with torch.no_grad():
            pipe(x)
        assert reserved(pipe) == sizes
    torch.testing.assert_close(*both, rtol=0, atol=0)


class Fails(nn.Module):
    """Raises an error in a backward."""

    def __init__(self) -> None:
        super().__init__()
        self.on = False

    def forward(self, x: Tensor) -> Tensor:
        if x.requires_grad:
            x.register_hook(self._fail)
        return x * 1

    def _fail(self, gradient: Tensor) -> None:
        if self.on:
            raise ArithmeticError("on purpose")


@pytest.mark.one_process("it looks into the pipe")
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_after_a_failure_the_buffers_are_there_again(schedule: str) -> None:
    fails = Fails()
    module = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), fails, nn.Linear(6, 3))
    pipe = Pipe(
        module, CHUNKS, "never", balance=[2, 2], devices=["cpu"] * 2, schedule=schedule, loss_fn=distance, offload=1
    )
    x, y = torch.randn(8, 6), torch.randn(8)

    def step() -> list[Tensor]:
        pipe(x, target=y).backward()
        return gradients(pipe)

    expected, sizes = step(), reserved(pipe)
    fails.on = True
    with pytest.raises(ArithmeticError):
        step()
    fails.on = False
    assert reserved(pipe) == sizes
    assert all(host.leaving == 0 for host in hosts(pipe))
    torch.testing.assert_close(step(), expected, rtol=0, atol=0)


class Overwrites(nn.Module):
    """Saves a tensor that the next micro-batch's forward, or that of two later, changes in place."""

    def __init__(self, distance: int) -> None:
        super().__init__()
        self._distance, self._seen = distance, []

    def forward(self, x: Tensor) -> Tensor:
        y = x.exp()
        self._seen.append(y.detach())
        if len(self._seen) > self._distance:
            self._seen[-1 - self._distance].mul_(2)
        return y * 2


@pytest.mark.one_process("the layer of one rank fails")
@pytest.mark.parametrize("later", [1, 2])
def test_a_saved_tensor_that_is_changed_in_place_is_an_error(later: int) -> None:
    module = nn.Sequential(nn.Linear(6, 6), Overwrites(later), nn.Linear(6, 3))
    pipe = Pipe(module, CHUNKS, "never", balance=[2, 1], devices=["cpu"] * 2, offload=1)
    with pytest.raises(RuntimeError, match=r"has been modified by an inplace operation: .*\(2, 6\) is at version 1"):
        pipe(torch.randn(8, 6)).sum().backward()


@pytest.mark.one_process("an error ends a pipe of ranks")
@pytest.mark.parametrize("checkpoint", ["never", "always"])
def test_a_mini_batch_for_which_the_host_has_too_little_changes_nothing(
    checkpoint: str, monkeypatch: pytest.MonkeyPatch, assert_trained_alike: Callable[..., None]
) -> None:
    norms = [nn.BatchNorm1d(6), nn.BatchNorm1d(6)]
    layers = nn.Sequential(nn.Linear(6, 6), norms[0], nn.Dropout(), nn.Tanh(), norms[1], nn.Linear(6, 3))
    plain, way = copy.deepcopy(layers), Way("gpipe", inside=True)
    moving, staying = (
        way.pipe(layers, CHUNKS, checkpoint, balance=[3, 3], share=True, offload=each)
        for each in ("activations", False)
    )
    monkeypatch.setattr("pipework.runtime.free_memory.free_host_memory", lambda: 100)
    inputs, buffers, state = vectors(8), [*layers.buffers()], torch.get_rng_state()
    with pytest.raises(MemoryError, match="activations need"):
        moving(*inputs, target=torch.ones(8))
    assert torch.equal(torch.get_rng_state(), state)
    assert all(one is other for one, other in zip(layers.buffers(), buffers, strict=True))
    assert_trained_alike(plain, staying, [vectors(8), vectors(8)], way=way)


@pytest.mark.one_process("no pipe is made")
@pytest.mark.parametrize("offload", [True, -1, 0, 1.5, "all", None])
def test_other_values_are_refused(offload: Any) -> None:
    with pytest.raises(ValueError, match=f"offload is False; 'activations', so .* for each stage: got {offload!r}"):
        Pipe(odd(), offload=offload)


@pytest.mark.one_process("no pipe is made")
def test_graphs_beside_it_and_a_schedule_that_says_it_itself_are_refused() -> None:
    schedule = with_offload(build("gpipe", workers=2, chunks=CHUNKS))
    with pytest.raises(ValueError, match="leave graphs= out, or offload="):
        Pipe(odd(), CHUNKS, graphs="auto", offload=1)
    with pytest.raises(ValueError, match="leave graphs= out, or offload="):
        Pipe(odd(), CHUNKS, schedule=schedule, graphs="auto")
    with pytest.raises(ValueError, match="offload is 2, but the schedule says itself what goes to host memory"):
        Pipe(odd(), CHUNKS, schedule=schedule, offload=2)


@pytest.mark.one_process("the timeline of all workers")
@pytest.mark.parametrize("checkpoint", ["never", "always"])
def test_a_recording_shows_copies_and_the_memory_that_is_left(checkpoint: str) -> None:
    x, y = torch.randn(8, 6), torch.randn(8)
    peaks = []
    for pipe in twins(checkpoint=checkpoint, debug=UNIFORM[checkpoint]):
        for _ in range(2):
            with pipe.record() as recording:
                pipe(x, target=y).backward()
        line = recording.timeline()
        found = [each for each in (*line.intervals, *line.communication) if each.worker == 1]
        assert sorted(each.action for each in found) == sorted(pipe.schedule().orders[1])
        assert all(each.start <= each.end for each in found)
        held = {str(each.action): each.held for each in found}
        assert held.get("1O0", 0) < held["1F0"] == held.get("1L0", held["1F0"])
        peaks.append(max(each.memory for each in line.intervals if each.worker == 1))
    assert peaks[0] < peaks[1] or checkpoint == "always"


@pytest.mark.one_process("no mini-batch is trained")
def test_a_pipe_in_which_nothing_moves_says_so() -> None:
    options: Any = {"schedule": "1f1b", "loss_fn": distance, "devices": ["cpu"] * 2, "offload": "activations"}
    with pytest.warns(UserWarning, match="offload= moves nothing: no worker of 1f1b, 2 workers"):
        pipe = Pipe(odd(), CHUNKS, "never", balance=[3, 3], **options)
    assert "0 of 4" in str(pipe)
