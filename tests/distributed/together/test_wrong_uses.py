"""What works in one process and would train something else in several: it is refused, by name."""

import contextlib
import copy
import re
import tempfile
import time
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import pipework
from pipework import Mesh, Pipe, PipelineError
from tests.distributed.together.alike import both, of_all_ranks, refused, train_alike
from tests.jobs import runs_on


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2))


def made(mesh: Mesh, model: nn.Sequential | None = None) -> Pipe:
    return Pipe(layers() if model is None else model, 2, mesh=mesh, schedule="1f1b", loss_fn=nn.functional.mse_loss)


X, Y = torch.ones(8, 4), torch.ones(8, 2)


@runs_on(2)
def test_the_wrapped_model_does_not_answer_for_others(mesh: Mesh) -> None:
    model = layers()
    early = torch.optim.AdamW(model.parameters())
    pipe = made(mesh, model)
    own, every = {id(parameter) for parameter in pipe.parameters()}, list(model.parameters())
    assert [parameter.is_meta for parameter in every] == [id(parameter) not in own for parameter in every]
    pipe(X, target=Y).backward()
    for optimizer in (early, torch.optim.SGD(model.parameters(), lr=1.0)):
        with pytest.raises(RuntimeError, match=rf"in other processes \(rank {1 - mesh.rank}\): .*pipe\.parameters\(\)"):
            optimizer.step()
    torch.optim.SGD(pipe.parameters(), lr=0.1).step()
    refusals: dict[str, Callable[[], object]] = {
        "no values in this process": lambda: model(X),
        r"pipe\.state_dict\(\) has the layers of this process": model.state_dict,
        r"Call pipe\.clip_grad_norm_": lambda: clip_grad_norm_(pipe.parameters(), 1.0),
    }
    for words, call in refusals.items():
        with pytest.raises(RuntimeError, match=words):
            call()
    pipe.clip_grad_norm_(1.0)


@runs_on(2)
def test_a_second_model_with_the_same_parameters_is_trained_by_its_own_optimizer(mesh: Mesh) -> None:
    model = layers()
    second = nn.Sequential(*list(model)[:2], nn.Linear(8, 1))  # has these parameters itself
    shared = [*model.parameters()]
    second[0] = nn.Linear(4, 8)
    second[0].weight, second[0].bias = shared[:2]  # type: ignore[assignment]
    pipe = made(mesh, model)
    optimizer = torch.optim.SGD(second.parameters(), lr=0.1)
    before = shared[0].detach().clone()
    second(X).sum().backward()
    optimizer.step()
    assert not torch.equal(before, shared[0])
    pipe(X, target=Y).backward()
    optimizer.step()


def equal_halves() -> nn.Sequential:
    """Each rank has layers that look like those of the other."""
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(4, 4) for _ in range(4)])


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(equal_halves())

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return nn.functional.mse_loss(x, labels)


@runs_on(2)
def test_a_pipe_of_the_layers_that_a_pipe_has_here_is_refused(mesh: Mesh) -> None:
    """One of the whole model goes on with the same values."""
    options: dict[str, Any] = {"schedule": "1f1b", "loss_fn": nn.functional.mse_loss}
    x = torch.arange(32.0).view(8, 4).sin()
    model = equal_halves()
    pipe, threads = pipes = both(model, mesh, 3, **options)
    train_alike(pipes, x, target=x)
    for each in pipes:
        torch.optim.SGD(each.parameters(), lr=0.5).step()
    with pytest.raises(AttributeError, match="'chunks' of a pipe cannot be changed: make a new Pipe"):
        pipe.chunks = 4
    wrapped = nn.Sequential(*[nn.Sequential(layer) for layer in pipe])
    for made_of in (nn.Sequential(*pipe), copy.deepcopy(pipe.partitions[0]), wrapped):
        with pytest.raises(ValueError, match=r"(?s)different settings.*made before \(it has those of its own process"):
            Pipe(made_of, chunks=4, mesh=mesh, **options)
    attached = pipework.attach(Blocks(), {"x": x, "labels": x}, chunks=2, mesh=mesh)
    with pytest.raises(AttributeError, match="make the model again, and load a checkpoint"):
        attached.chunks = 4
    with pytest.raises(ValueError, match=r"1 of 2 processes: .*of a pipe made before, take the whole model"):
        Pipe(nn.Sequential(*attached), chunks=4, mesh=mesh, **options)
    looped = pipework.attach(Blocks(), {"x": x, "labels": x}, chunks=2, schedule="interleaved-1f1b", mesh=mesh)
    with pytest.raises(ValueError, match="gave up its values when a pipe was made of this model before"):
        Pipe(nn.Sequential(*looped), chunks=4, mesh=mesh, **options)
    plain = nn.Sequential(*threads)
    reference = Pipe(plain, 4, devices=["cpu"] * 2, **options)
    for again in (Pipe(model, 4, mesh=mesh, **options), Pipe(nn.Sequential(*model), 4, mesh=mesh, **options)):
        assert torch.equal(again(x, target=x), reference(x, target=x))
    with torch.no_grad():  # each rank has its layers there
        part = Pipe(nn.Sequential(*list(model)[:3]), 2, balance=[2, 1], mesh=mesh)
        assert torch.equal(part(x, outputs="all"), Pipe(plain[:3], 2, devices=["cpu"])(x))


# ---- other data ------------------------------------------------------------------------------------------------------


def rows() -> TensorDataset:
    torch.manual_seed(1)
    return TensorDataset(torch.randn(32, 4), torch.randn(32, 2))


@runs_on(2)
def test_other_rows_are_seen_in_the_first_step_and_other_targets_now_and_then(mesh: Mesh) -> None:
    """Constant and counted targets do not tell rows."""
    sampler = DistributedSampler(rows(), len(mesh.ranks), mesh.rank)
    batches = [*DataLoader(rows(), 8, sampler=sampler)][:1]
    batches += [(torch.full((8, 4), float(mesh.rank)), y) for y in (torch.zeros(8, 2), torch.arange(16.0).view(8, 2))]
    for x, y in batches:
        with refused(r"rank 1 was given other inputs than rank 0 in call 1(?s:.*)take pipe.sampler\(dataset\)"):
            made(mesh)(x, target=y)
    pipe, step = made(mesh), 0
    with refused("^rank 1 was given other targets than rank 0 in call 32"):
        for step in range(100):
            y = torch.full((8, 2), float(step if step < 9 else step * 2 + mesh.rank))
            pipe(X if pipe.is_first else None, target=y).backward()
    assert step == 31


@runs_on(4, dp=2)
def test_the_sampler_gives_ranks_the_same_rows_and_replicas_others(mesh: Mesh) -> None:
    pipe = made(mesh)
    sampler = pipe.sampler(rows(), seed=3)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for x, y in DataLoader(rows(), 4, sampler=sampler):
            pipe(x, target=y).backward()
    first, second, third, fourth = of_all_ranks(list(sampler))
    assert (first, third) == (second, fourth)
    assert sorted(first + third) == list(range(32))


@runs_on(3)
def test_what_no_rank_reads_may_differ(mesh: Mesh) -> None:
    pipe = made(mesh)
    x, y = torch.arange(32.0).view(8, 4).sin(), torch.arange(16.0).view(8, 2).sin()
    other = torch.full((8, 4), float(mesh.rank))
    for _ in range(2):
        pipe(other, target=y)  # as of an augmentation that each rank draws for itself
        pipe(x, target=other[:, :2])
        between = not (pipe.is_first or pipe.is_last)
        pipe(other if between else x, target=y if not between else other)
        pipe(x if pipe.is_first else float(mesh.rank), target=y)


# ---- other calls, and other backwards --------------------------------------------------------------------------------


@pytest.mark.parametrize("late", [0, 1])
@runs_on(2)
def test_pipes_that_ranks_call_in_another_order_are_named_within_seconds(mesh: Mesh, late: int) -> None:
    """Both pipes work in the same order; then each rank calls another one. The first to see that leaves at once."""
    pipes = [made(mesh), made(mesh)]
    for pipe in pipes * 2:
        pipe(X, target=Y).backward()
    time.sleep(1.2 * (late == mesh.rank))
    begin = time.monotonic()
    with refused(None, PipelineError) as caught:
        for pipe in pipes if mesh.rank else pipes[::-1]:
            pipe(X, target=Y)
    assert caught.value.kind == "disagreement"
    one, other = (f"rank {each} (stage {each})" for each in (mesh.rank, 1 - mesh.rank))
    text = f"{re.escape(one)} waits in call 3 of pipe (\\d+), and {re.escape(other)} in call 3 of pipe (\\d+), which "
    found = re.match(text, str(caught.value))
    assert found is not None
    assert int(found[1]) - int(found[2]) == (-1 if mesh.rank else 1)
    assert str(caught.value).endswith("call all pipes in the same order on all ranks")
    assert time.monotonic() - begin < 30


@pytest.mark.parametrize("end", ["call", "outside", "call later", "save", "clip"])
@runs_on(3)
def test_another_backward_on_the_last_rank_alone_is_noticed(mesh: Mesh, end: str) -> None:
    """It alone goes backward after the second call, multiplies the last loss, or leaves its backward out."""
    pipe = Pipe(layers(), 2, mesh=mesh) if end == "outside" else made(mesh)
    calls: dict[str, Callable[[], object]] = {
        "clip": lambda: pipe.clip_grad_norm_(1.0),
        "save": lambda: pipework.save_checkpoint(tempfile.mkdtemp(), pipe, step=1),
    }
    words = {
        "call": r"loss.backward\(\) was called on rank 2 and not on rank .* after call 2 of the pipe: the layers",
        "outside": "call 4 is 'backward' on rank 2|'training step'",
        "clip": "and not on rank 2, after call 3 of the pipe",
    }
    with refused(words.get(end, "the loss of call 3 of the pipe was multiplied by ")):
        for step in range(3):
            loss = (pipe(X, outputs="all") - Y).square().mean() if end == "outside" else pipe(X, target=Y)
            if end in ("call", "outside"):
                if pipe.is_last or step != 1:
                    loss.backward()
            elif not (end == "clip" and pipe.is_last and step == 2):
                (loss * (0.5 if pipe.is_last and step == 2 else 1.0)).backward()
        calls.get(end, lambda: pipe(X, target=Y))()


@runs_on(2, dp=2)
def test_a_backward_on_one_replica_alone_is_noticed(mesh: Mesh) -> None:
    pipe = made(mesh)
    with refused(r"loss.backward\(\) was called on some replicas of the pipe and not on others"):
        for step in range(3):
            loss = pipe(X, target=Y)
            if pipe.data_parallel_rank == 0 or step != 1:
                loss.backward()


@runs_on(3)
def test_right_backwards_are_no_error(mesh: Mesh) -> None:
    pipe = made(mesh)

    def loss() -> Tensor:
        return pipe(X, target=Y)

    with torch.no_grad():
        loss()
    loss()  # dropped
    for _ in range(3):
        loss().backward()
    sum(loss() for _ in range(3)).backward()  # type: ignore[union-attr]
    before = loss()
    for _ in range(3):  # each backward comes after the next forward
        now = loss()
        before.backward()
        before = now
    again = loss()
    again.backward(retain_graph=True)
    again.backward()
    own = list(pipe.parameters())
    assert all(gradient is not None for gradient in torch.autograd.grad(loss(), own))
    loss().backward(inputs=own)
    looked_at = loss()
    if pipe.is_last:  # for a look at a gradient, which is not accumulated
        torch.autograd.grad(looked_at, own)
    pipe.eval()
    saliency = loss()
    if pipe.is_first:
        saliency.backward()
    pipe.train()
    for factor in (0.5, 3.0, 0.0):
        (loss() * factor).backward()
    (loss() + loss() * 2.0).backward()
    looked_at = loss()
    if pipe.is_last:  # for a look, too; what counts is the last
        (looked_at * 2.0).backward(retain_graph=True)
        pipe.zero_grad()
    looked_at.backward()
    first = loss()
    for _ in range(40):
        loss()
    if pipe.is_last:  # so long ago that nobody remembers
        first.backward()
    hook = own[0].register_hook(lambda _: 1 / 0)
    failing = loss()
    with pytest.raises(ZeroDivisionError):
        failing.backward()
    hook.remove()
    loss().backward()
    pipe.zero_grad()
    if not pipe.is_last:
        pipe.requires_grad_(False)
    for _ in range(2):  # a rank with nothing to train needs no backward
        partly = loss()
        if pipe.is_last:
            partly.backward()
    assert (own[0].grad is not None) == pipe.is_last
    loss()
    pipe.requires_grad_(True)
    gradients = []
    for options in ({}, {"loss_scale": 0.125 if pipe.is_last else 0.5}):  # the last rank's counts
        pipe.zero_grad()
        gradients.append(pipe(X, target=Y, **options))
        gradients[-1].backward()
        gradients += [each.grad for each in own]
    half = len(gradients) // 2
    assert all(torch.equal(one * 0.125, other) for one, other in zip(gradients[:half], gradients[half:], strict=True))
    with refused(r"call the pipe differently in call .*: scales_loss is "):
        pipe(X, target=Y, **({"loss_scale": 0.5} if pipe.is_first else {}))


@runs_on(2, dp=2)
def test_right_backwards_of_replicas_are_no_error(mesh: Mesh) -> None:
    pipe = made(mesh)
    before = pipe(X, target=Y)
    for step in range(40):
        now = pipe(X, target=Y)
        if step % 5:
            (before * (1.0 + pipe.data_parallel_rank)).backward()  # a mean over replicas by hand
        before = now
        with torch.no_grad():
            pipe(X, target=Y)


# ---- other settings --------------------------------------------------------------------------------------------------


@runs_on(4, dp=2)
def test_what_all_processes_doubt_is_told_by_one(mesh: Mesh) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        Pipe(layers(), 1, mesh=mesh)
    assert [str(each.message)[:11] for each in caught] == ([] if mesh.rank else ["chunks is 1"])


@runs_on(2)
def test_tied_weights_that_optimizers_treat_differently_are_noticed(mesh: Mesh) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    model[2].weight = model[0].weight
    pipe = Pipe(model, 2, mesh=mesh, loss_fn=lambda output, target: (output - target).abs().mean(), balance=[2, 1])
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1 * (1 + mesh.rank))
    words = r"the copies of the tied parameter '0.weight' \(stages 0, 1\) have different values on rank"
    for step in (1, 2):
        with refused(words) if step == 2 else contextlib.nullcontext():
            pipe(X, target=X).backward()
            optimizer.step()


@runs_on(2, fresh=True)
def test_a_pipe_without_the_mesh_is_doubted_once(mesh: Mesh) -> None:
    told = []
    for options in ({}, {"devices": ["cpu"]}, {"mesh": mesh}, {}):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            Pipe(layers(), 2, schedule="1f1b", **options)
        told.append([str(each.message) for each in caught if "init" in str(each.message)])
        assert all(each.filename == __file__ for each in caught)
    assert [len(each) for each in told] == ([0, 0, 0, 0] if mesh.rank else [1, 0, 0, 0])
    words = "joined 2 processes, and this pipe has no mesh: each process trains the whole model, alone"
    assert mesh.rank or words in told[0][0]
