"""What the processes of a pipe do for each other: tied layers, replicas, norms, checkpoints, models on meta."""

import copy
import gc
import pickle
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional

import pipework
from pipework import Mesh, Pipe, load_checkpoint, save_checkpoint

Run = Callable[..., list[Any]]


class Head(nn.Module):
    """Shares its weight with an embedding."""

    def __init__(self, embedding: nn.Embedding) -> None:
        super().__init__()
        self.weight = embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.weight)


def tied_model() -> nn.Sequential:
    embedding = nn.Embedding(11, 8)
    return nn.Sequential(embedding, nn.Linear(8, 8), nn.Tanh(), Head(embedding)).double()


def loss_of_tokens(output: Tensor, target: Tensor) -> Tensor:
    return functional.cross_entropy(output.flatten(0, 1), target.flatten())


def train_tied(mesh: Mesh, schedule: str) -> None:
    torch.manual_seed(mesh.rank)  # copies of a tied parameter get the values of the first stage's
    model = tied_model()
    pipe = Pipe(model, chunks=4, schedule=schedule, loss_fn=loss_of_tokens, mesh=mesh, balance=[1] * 4)
    weight = next((p for p in pipe.parameters() if p.shape == (11, 8)), None)
    torch.manual_seed(1)
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1, momentum=0.9) if list(pipe.parameters()) else None

    def of_both(what: Callable[[Tensor], Tensor]) -> set[str]:
        return set(pipe.ranks.all_gather_text("" if weight is None else str(what(weight).sum().item()))) - {""}

    for _ in range(3):
        assert len(of_both(lambda weight: weight)) == 1
        x, y = torch.randint(0, 11, (8, 5)), torch.randint(0, 11, (8, 5))
        torch.manual_seed(1)
        pipe(x, target=y).backward()
        assert len(of_both(lambda weight: weight if weight.grad is None else weight.grad)) == 1
        if optimizer is not None:
            optimizer.step()
            optimizer.zero_grad()


def train_tied_like_threads(mesh: Mesh, schedule: str) -> None:
    model = tied_model()
    threads = Pipe(
        copy.deepcopy(model),
        chunks=4,
        schedule=schedule,
        loss_fn=loss_of_tokens,
        devices=["cpu"] * len(mesh.ranks),
        balance=[1] * 4 if schedule == "zb-v" else [2, 2],
    )
    pipe = Pipe(model, chunks=4, schedule=schedule, loss_fn=loss_of_tokens, mesh=mesh, balance=threads.balance)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1, momentum=0.9) for each in (pipe, threads)]
    for _ in range(3):
        x, y = torch.randint(0, 11, (8, 5)), torch.randint(0, 11, (8, 5))
        loss, expected = pipe(x, target=y), threads(x, target=y)
        torch.testing.assert_close(loss, expected, rtol=1e-12, atol=0)
        loss.backward()
        expected.backward()
        for name, parameter in pipe.named_parameters():
            torch.testing.assert_close(parameter.grad, threads.get_parameter(name).grad, rtol=1e-12, atol=1e-15)
        norms = [pipe.clip_grad_norm_(0.5), threads.clip_grad_norm_(0.5)]
        torch.testing.assert_close(*norms, rtol=1e-12, atol=0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def model_with_norms() -> nn.Sequential:
    layers: Iterator[nn.Module] = iter(
        (nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 8), nn.Linear(8, 3))
    )
    return nn.Sequential(*layers)


def clip_and_save(mesh: Mesh, folder: str) -> None:
    model = model_with_norms()
    plain = copy.deepcopy(model)
    pipe = Pipe(model, chunks=1, schedule="1f1b", loss_fn=functional.cross_entropy, mesh=mesh)
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=0.01)
    reference = torch.optim.AdamW(plain.parameters(), lr=0.01)

    def step(x: Tensor, y: Tensor) -> None:
        loss = pipe(x, target=y)
        loss.backward()
        expected = functional.cross_entropy(plain(x), y)
        expected.backward()
        assert torch.equal(loss, expected)
        norm = pipe.clip_grad_norm_(0.1)
        assert torch.equal(norm, nn.utils.clip_grad_norm_(plain.parameters(), 0.1))
        for name, parameter in pipe.named_parameters():
            assert torch.equal(parameter.grad, plain.get_parameter(name).grad)
        for each in (optimizer, reference):
            each.step()
            each.zero_grad()

    batches = [(torch.randn(8, 6), torch.randint(0, 3, (8,))) for _ in range(4)]
    for batch in batches[:2]:
        step(*batch)
    state = {name: tensor for name, tensor in plain.state_dict().items() if name in pipe.state_dict()}
    assert all(torch.equal(tensor, state[name]) for name, tensor in pipe.state_dict().items())
    save_checkpoint(folder, pipe, optimizer, step=2, data_position={"batch": 2})
    before = copy.deepcopy(plain.state_dict()), copy.deepcopy(reference.state_dict())
    for batch in batches[2:]:
        step(*batch)
    pipe.load_state_dict(plain.state_dict())  # of the whole model
    # Back to where it was saved, and on again.
    checkpoint = load_checkpoint(folder, pipe, optimizer)
    assert checkpoint is not None
    assert checkpoint.step == 2
    assert checkpoint.data_position == {"batch": 2}
    plain.load_state_dict(before[0])
    reference.load_state_dict(before[1])
    for batch in batches[2:]:
        step(*batch)


def load_into_threads(folder: Path) -> None:
    pipe = Pipe(model_with_norms(), devices=["cpu"] * 3)
    assert load_checkpoint(folder, pipe, torch.optim.AdamW(pipe.parameters())) is not None


def on_meta(mesh: Mesh) -> list[float]:
    torch.manual_seed(5)
    with torch.device("meta"):
        model = model_with_norms()
    pipe = Pipe(model, chunks=2, loss_fn=functional.cross_entropy, mesh=mesh)
    assert [parameter.device.type for parameter in model.parameters()].count("meta") > 0 or len(mesh.ranks) == 1
    torch.manual_seed(5)
    with torch.device("meta"):
        threads = Pipe(model_with_norms(), chunks=2, loss_fn=functional.cross_entropy, devices=["cpu"] * 3)
    for name, tensor in pipe.state_dict().items():
        assert torch.equal(tensor, threads.state_dict()[name]), name
    x, y = torch.randn(8, 6), torch.randint(0, 3, (8,))
    loss = pipe(x, target=y)
    assert torch.equal(loss, threads(x, target=y))
    return [loss.item()]


@pytest.mark.parametrize("schedule", ["1f1b", "zb-v"])
def test_tied_layers_train_as_in_threads(on_ranks: Run, schedule: str) -> None:
    on_ranks(2, train_tied_like_threads, schedule=schedule)


def test_tied_layers_start_from_the_values_of_the_first_stage(on_ranks: Run) -> None:
    on_ranks(4, train_tied, schedule="1f1b")


def test_clipping_and_checkpoints(on_ranks: Run, tmp_path: Path) -> None:
    on_ranks(2, clip_and_save, folder=str(tmp_path))
    load_into_threads(tmp_path)


def test_a_model_on_the_meta_device(on_ranks: Run) -> None:
    losses = on_ranks(2, on_meta)
    assert losses[0] == losses[1]


def train_replicas(mesh: Mesh, schedule: str, folder: str) -> None:
    model = model_with_norms()
    del model[1]  # whose statistics would differ between replicas
    plain = copy.deepcopy(model)
    if mesh.data_parallel_rank:
        for parameter in model.parameters():
            nn.init.zeros_(parameter)  # replicas get the values of the first
    pipe = Pipe(model, chunks=2, schedule=schedule, loss_fn=functional.cross_entropy, mesh=mesh)
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
                part = functional.cross_entropy(plain(x[replica][rows]), y[replica][rows]) / 2
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


@pytest.mark.parametrize("schedule", ["1f1b", "zb-v"])
def test_replicas_train_as_one_model_on_all_data(on_ranks: Run, schedule: str, tmp_path: Path) -> None:
    on_ranks(4, train_replicas, init={"dp": 2}, schedule=schedule, folder=str(tmp_path))


def record(mesh: Mesh, folder: str) -> list[float]:
    pipe = Pipe(model_with_norms(), chunks=4, schedule="1f1b", loss_fn=functional.cross_entropy, mesh=mesh)
    x, y = torch.randn(8, 6), torch.randint(0, 3, (8,))
    with pipe.record() as recording:
        for _ in range(2):
            pipe(x, target=y).backward()
    timeline = recording.timeline()
    assert {interval.worker for interval in timeline.intervals} == {0, 1}
    assert len(timeline.intervals) == sum(action.kind in "FBR" for order in pipe.schedule().orders for action in order)
    recording.save(f"{folder}/{mesh.rank}.svg")
    assert "this process has 1 partition" in repr(pipe)
    for attempt in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="cannot be copied"):
            attempt(pipe)
    with pytest.raises(ValueError, match="without a mesh"):
        pipe.predict(x, target=y)
    return [timeline.makespan]


def test_every_process_gets_the_whole_recording(on_ranks: Run, tmp_path: Path) -> None:
    makespans = on_ranks(2, record, folder=str(tmp_path))
    assert makespans[0] == pytest.approx(makespans[1])
    assert {path.name for path in tmp_path.iterdir()} == {"0.svg", "1.svg"}


def stop(mesh: Mesh) -> list[int]:
    pipe = Pipe(model_with_norms(), chunks=4, schedule="1f1b", loss_fn=functional.cross_entropy, mesh=mesh)
    x, y = torch.randn(8, 6), torch.randint(0, 3, (8,))
    for step in range(1000):
        pipe(x, target=y).backward()
        if mesh.rank == 0 and step == 3:
            pipe.request_stop()
        if pipe.stopping:
            return [step]
    return []


def test_all_processes_stop_after_the_same_step(on_ranks: Run) -> None:
    (first,), (second,) = on_ranks(2, stop)
    assert first == second
    assert first >= 3


class FoundInf(nn.Module):
    """Its gradients are infinite in one training step."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x * self.weight * (torch.inf if self.calls == 3 else 1.0)


def scale(mesh: Mesh) -> list[float]:
    model = nn.Sequential(nn.Linear(6, 3), FoundInf())
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    pipe = Pipe(model, chunks=2, schedule="1f1b", loss_fn=functional.cross_entropy, mesh=mesh, grad_scaler=scaler)
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
    x, y = torch.randn(8, 6), torch.randint(0, 3, (8,))
    scales = []
    for _ in range(3):
        before = [parameter.detach().clone() for parameter in pipe.parameters()]
        scaler.scale(pipe(x, target=y)).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        scales.append(scaler.get_scale())
        moved = [not torch.equal(p, old) for p, old in zip(pipe.parameters(), before, strict=True)]
        assert any(moved) == (len(scales) != 2)
    return scales


def test_a_gradient_scaler_skips_the_same_steps_everywhere(on_ranks: Run) -> None:
    assert on_ranks(2, scale) == [[1024.0, 512.0, 512.0]] * 2


def drop(mesh: Mesh) -> None:
    model = model_with_norms()
    before = threading.active_count()
    pipe = Pipe(model, chunks=2, schedule="1f1b", loss_fn=functional.cross_entropy, mesh=mesh)
    loss = pipe(torch.randn(8, 6), target=torch.randint(0, 3, (8,)))
    loss.backward()
    assert threading.active_count() > before
    gc.disable()
    del pipe, loss
    assert threading.active_count() == before


def test_a_pipe_that_is_dropped_leaves_nothing(on_ranks: Run) -> None:
    on_ranks(2, drop)


def own_device_mesh(mesh: Mesh, names: list[str]) -> list[int]:
    shape = (len(mesh.everyone),) if names == ["pp"] else (2, 2)
    given = init_device_mesh("cpu", shape, mesh_dim_names=tuple(names))
    pipe = Pipe(model_with_norms(), chunks=2, schedule="1f1b", loss_fn=functional.cross_entropy, mesh=given)
    pipe(torch.randn(8, 6), target=torch.randint(0, 3, (8,))).backward()
    return [pipe.data_parallel_rank, pipe.data_parallel_size, *pipe.stages]


def test_a_device_mesh_of_the_users_own(on_ranks: Run) -> None:
    assert on_ranks(2, own_device_mesh, names=["pp"]) == [[0, 1, 0], [0, 1, 1]]
    assert on_ranks(4, own_device_mesh, names=["pp", "dp"]) == [[0, 2, 0], [1, 2, 0], [0, 2, 1], [1, 2, 1]]


def odd_meshes(mesh: Mesh) -> None:
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
    with pytest.raises(ValueError, match="detect must be at least 1 second"):
        pipework.init(detect=0.4)
    device_mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("pp",))
    with pytest.raises(ValueError, match="action_timeout must be a positive number of seconds, or None: got 0"):
        Mesh.of(device_mesh, action_timeout=0)
    assert Mesh.of(device_mesh, detect=3, grace=1).grace == 1
    with pytest.raises(ValueError, match=r"different settings.*\n.*chunks: 2 on rank 0.*; 3 on rank 1"):
        Pipe(module, chunks=2 + mesh.rank, mesh=mesh)


def test_meshes_and_settings_that_do_not_fit_are_refused(on_ranks: Run) -> None:
    on_ranks(2, odd_meshes)
