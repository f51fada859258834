"""What the processes of a pipe do for each other: tied layers, replicas, norms, checkpoints, models on meta."""

import copy
import gc
import pickle
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.functional import cross_entropy, linear

import pipework
from pipework import Mesh, Pipe, load_checkpoint, save_checkpoint
from tests.distributed.together.alike import both, of_all_ranks, other_gradients
from tests.jobs import runs_on


class Head(nn.Module):
    """Shares its weight with an embedding."""

    def __init__(self, embedding: nn.Embedding) -> None:
        super().__init__()
        self.weight = embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight)


def tied_model() -> nn.Sequential:
    embedding = nn.Embedding(11, 8)
    return nn.Sequential(embedding, nn.Linear(8, 8), nn.Tanh(), Head(embedding)).double()


def loss_of_tokens(output: Tensor, target: Tensor) -> Tensor:
    return cross_entropy(output.flatten(0, 1), target.flatten())


@runs_on(4)
def test_tied_layers_start_from_the_values_of_the_first_stage(mesh: Mesh) -> None:
    torch.manual_seed(mesh.rank)
    pipe = Pipe(tied_model(), chunks=4, schedule="1f1b", loss_fn=loss_of_tokens, mesh=mesh, balance=[1] * 4)
    weight = next((p for p in pipe.parameters() if p.shape == (11, 8)), None)
    torch.manual_seed(1)
    optimizer = torch.optim.SGD([{"params": [*pipe.parameters()]}], lr=0.1, momentum=0.9)

    def copies(what: Callable[[Tensor], Tensor]) -> int:
        return len({*of_all_ranks("" if weight is None else str(what(weight).sum().item()))} - {""})

    for _ in range(3):
        assert copies(lambda weight: weight) == 1
        x, y = torch.randint(0, 11, (8, 5)), torch.randint(0, 11, (8, 5))
        pipe(x, target=y).backward()
        assert copies(lambda weight: weight if weight.grad is None else weight.grad) == 1
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("schedule", ["1f1b", "zb-v"])
@runs_on(2)
def test_tied_layers_train_as_in_threads(mesh: Mesh, schedule: str, folder: str) -> None:
    balance = [1] * 4 if schedule == "zb-v" else [2, 2]
    pipes = pipe, threads = both(tied_model(), mesh, schedule=schedule, loss_fn=loss_of_tokens, balance=balance)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1, momentum=0.9) for each in pipes]
    for _ in range(3):
        x, y = torch.randint(0, 11, (8, 5)), torch.randint(0, 11, (8, 5))
        losses = [each(x, target=y) for each in pipes]
        torch.testing.assert_close(*losses, rtol=1e-12, atol=0)
        for loss in losses:
            loss.backward()
        for name, parameter in pipe.named_parameters():
            torch.testing.assert_close(parameter.grad, threads.get_parameter(name).grad, rtol=1e-12, atol=1e-15)
            parameter.grad = threads.get_parameter(name).grad.clone()
        assert torch.equal(*[each.clip_grad_norm_(0.5) for each in pipes])
        assert other_gradients(pipe, threads) == []
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    # Each rank has a copy of the tied weight, and saves it; threads have one.
    save_checkpoint(folder, pipe, optimizers[0], step=3)
    with torch.no_grad():
        for each in threads.parameters():
            each.zero_()
            optimizers[1].state[each]["momentum_buffer"].zero_()
    for loading, optimizer in zip(pipes, optimizers, strict=True):
        assert load_checkpoint(folder, loading, optimizer) is not None
    for name, parameter in pipe.named_parameters():
        other = threads.get_parameter(name)
        assert torch.equal(parameter, other), name
        moments = [of.state[each]["momentum_buffer"] for of, each in zip(optimizers, (parameter, other), strict=True)]
        assert torch.equal(*moments), name


def model_with_norms() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 8), nn.Linear(8, 3))


def batch(rows: int = 8) -> tuple[Tensor, Tensor]:
    return torch.randn(rows, 6), torch.randint(0, 3, (rows,))


def pipe_of(mesh: Mesh, module: nn.Sequential | None = None, chunks: int = 2, **options: Any) -> Pipe:
    module = model_with_norms() if module is None else module
    return Pipe(module, chunks, schedule="1f1b", loss_fn=cross_entropy, mesh=mesh, **options)


@runs_on(2)
def test_clipping_and_checkpoints(mesh: Mesh, folder: str) -> None:
    model = model_with_norms()
    plain = copy.deepcopy(model)
    pipe = pipe_of(mesh, model, chunks=1)
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=0.01)
    reference = torch.optim.AdamW(plain.parameters(), lr=0.01)

    def step(x: Tensor, y: Tensor) -> None:
        loss, expected = pipe(x, target=y), cross_entropy(plain(x), y)
        loss.backward()
        expected.backward()
        assert torch.equal(loss, expected)
        assert torch.equal(pipe.clip_grad_norm_(0.1), nn.utils.clip_grad_norm_(plain.parameters(), 0.1))
        assert other_gradients(pipe, plain) == []
        for each in (optimizer, reference):
            each.step()
            each.zero_grad()

    batches = [batch() for _ in range(4)]
    for each in batches[:2]:
        step(*each)
    state = plain.state_dict()
    assert all(torch.equal(tensor, state[name]) for name, tensor in pipe.state_dict().items())
    save_checkpoint(folder, pipe, optimizer, step=2, data_position={"batch": 2})
    before = copy.deepcopy(plain.state_dict()), copy.deepcopy(reference.state_dict())
    for each in batches[2:]:
        step(*each)
    pipe.load_state_dict(plain.state_dict())  # of the whole model
    # Back to where it was saved, and on again.
    checkpoint = load_checkpoint(folder, pipe, optimizer)
    assert checkpoint is not None
    assert (checkpoint.step, checkpoint.data_position) == (2, {"batch": 2})
    plain.load_state_dict(before[0])
    reference.load_state_dict(before[1])
    for each in batches[2:]:
        step(*each)
    for parameter in pipe.parameters():
        parameter.grad = torch.full_like(parameter, torch.nan)
    with pytest.raises(RuntimeError, match=r"total norm of order 2\.0 .* is nan"):
        pipe.clip_grad_norm_(0.3, error_if_nonfinite=True)
    pipe.zero_grad()
    assert torch.equal(pipe.clip_grad_norm_(0.3), torch.tensor(0.0))  # after the error, which all have seen
    threads = Pipe(model_with_norms(), devices=["cpu"] * 3)
    assert load_checkpoint(folder, threads, torch.optim.AdamW(threads.parameters())) is not None


@pytest.mark.parametrize("schedule", ["1f1b", "zb-v"])
@runs_on(4, dp=2)
def test_replicas_train_as_one_model_on_all_data(mesh: Mesh, schedule: str, folder: str) -> None:
    model = model_with_norms()
    del model[1]  # whose statistics would differ between replicas
    plain = copy.deepcopy(model)
    if mesh.data_parallel_rank:
        for parameter in model.parameters():
            nn.init.zeros_(parameter)  # replicas get the values of the first
    pipe = Pipe(model, chunks=2, schedule=schedule, loss_fn=cross_entropy, mesh=mesh)
    assert (pipe.data_parallel_size, pipe.data_parallel_rank) == (2, mesh.rank // 2)
    optimizer, reference = (torch.optim.SGD(each.parameters(), lr=0.1, momentum=0.9) for each in (pipe, plain))
    for _ in range(3):
        x, y = torch.randn(2, 8, 6), torch.randint(0, 3, (2, 8))
        mine = pipe.data_parallel_rank
        loss = pipe(x[mine], target=y[mine])
        loss.backward()
        losses = []
        for replica in range(2):
            for n in range(2):
                rows = slice(4 * n, 4 * n + 4)
                part = cross_entropy(plain(x[replica][rows]), y[replica][rows]) / 2
                losses.append(part.item())
                (part / 2).backward()
        assert loss.item() == pytest.approx(sum(losses[2 * mine : 2 * mine + 2]), rel=1e-6)
        for name, parameter in pipe.named_parameters():
            torch.testing.assert_close(parameter.grad, plain.get_parameter(name).grad, rtol=1e-4, atol=1e-6)
        norms = pipe.clip_grad_norm_(0.1), nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
        torch.testing.assert_close(*norms, rtol=1e-5, atol=0)
        for each in (optimizer, reference):
            each.step()
            each.zero_grad()
    save_checkpoint(folder, pipe, optimizer, step=3)
    assert load_checkpoint(folder, pipe, optimizer) is not None


@runs_on(2)
def test_every_process_gets_the_whole_recording(mesh: Mesh, folder: str) -> float:
    pipe = pipe_of(mesh, chunks=4)
    x, y = batch()
    with pipe.record() as recording:
        for _ in range(2):
            pipe(x, target=y).backward()
    timeline = recording.timeline()
    assert {interval.worker for interval in timeline.intervals} == {0, 1}
    assert len(timeline.intervals) == sum(action.kind in "FBR" for order in pipe.schedule().orders for action in order)
    recording.save(f"{folder}/{mesh.rank}.svg")
    assert Path(folder, f"{mesh.rank}.svg").exists()
    for attempt in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="cannot be copied"):
            attempt(pipe)
    with pytest.raises(ValueError, match="without a mesh"):
        pipe.predict(x, target=y)
    return round(timeline.makespan, 6)


@runs_on(2)
def test_a_pipe_that_is_dropped_leaves_nothing(mesh: Mesh) -> None:
    before = {*threading.enumerate()}
    pipe = pipe_of(mesh)
    x, y = batch()
    loss = pipe(x, target=y)
    loss.backward()
    assert {*threading.enumerate()} - before
    gc.disable()
    try:
        del pipe, loss
        assert {*threading.enumerate()} <= before
    finally:
        gc.enable()
    pipe = pipe_of(mesh)
    vars(pipe[0])["pipe"] = pipe  # as a model that is attached knows its pipe
    pipe(x, target=y).backward()
    del pipe
    gc.collect()
    assert {*threading.enumerate()} <= before


@runs_on(2)
def test_meshes_and_settings_that_do_not_fit_are_refused(mesh: Mesh) -> None:
    module = model_with_norms()
    with pytest.raises(TypeError, match=r"wanted what pipework\.init"):
        Pipe(module, mesh="cpu")
    with pytest.raises(ValueError, match=r"dimensions .'model',.: wanted 'pp'"):
        Pipe(module, mesh=init_device_mesh("cpu", (2,), mesh_dim_names=("model",)))
    with pytest.raises(ValueError, match="each process has its device already"):
        Pipe(module, mesh=mesh, devices=["cpu", "cpu"])
    with pytest.raises(ValueError, match="the pipe has 1 layer for 1 of 2 processes: start 1, or make replicas"):
        Pipe(nn.Sequential(nn.Linear(2, 2)), mesh=mesh)
    with pytest.raises(ValueError, match="dp is 3, and there are 2 processes"):
        pipework.init(dp=3)
    device_mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("pp",))
    with pytest.raises(ValueError, match="action_timeout must be a positive number of seconds, or None: got 0"):
        Mesh.of(device_mesh, action_timeout=0)
    assert Mesh.of(device_mesh, detect=3, grace=1).grace == 1
