"""What works in one process and would train something else in several: it is refused, by name."""

import contextlib
import copy
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

Run = Callable[..., list[Any]]


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2))


def made(mesh: Mesh, model: nn.Sequential | None = None) -> Pipe:
    return Pipe(layers() if model is None else model, 2, mesh=mesh, schedule="1f1b", loss_fn=nn.functional.mse_loss)


def stale(mesh: Mesh) -> None:
    model = layers()
    early = torch.optim.AdamW(model.parameters())
    pipe = made(mesh, model)
    own, every = {id(parameter) for parameter in pipe.parameters()}, list(model.parameters())
    assert [parameter.is_meta for parameter in every] == [id(parameter) not in own for parameter in every]
    pipe(torch.ones(8, 4), target=torch.ones(8, 2)).backward()
    for optimizer in (early, torch.optim.SGD(model.parameters(), lr=1.0)):
        with pytest.raises(RuntimeError, match=rf"in other processes \(rank {1 - mesh.rank}\): .*pipe\.parameters\(\)"):
            optimizer.step()
    torch.optim.SGD(pipe.parameters(), lr=0.1).step()
    with pytest.raises(RuntimeError, match="no values in this process"):
        model(torch.ones(8, 4))
    with pytest.raises(RuntimeError, match=r"pipe\.state_dict\(\) has the layers of this process"):
        model.state_dict()
    with pytest.raises(RuntimeError, match=r"Call pipe\.clip_grad_norm_"):
        clip_grad_norm_(pipe.parameters(), 1.0)
    pipe.clip_grad_norm_(1.0)


def second_model(mesh: Mesh) -> None:
    model = layers()
    second = nn.Sequential(*list(model)[:2], nn.Linear(8, 1))  # has these parameters itself
    shared = [*model.parameters()]
    second[0] = nn.Linear(4, 8)
    second[0].weight, second[0].bias = shared[:2]  # type: ignore[assignment]
    pipe = made(mesh, model)
    optimizer = torch.optim.SGD(second.parameters(), lr=0.1)
    before = shared[0].detach().clone()
    second(torch.ones(8, 4)).sum().backward()
    optimizer.step()
    assert not torch.equal(before, shared[0])
    pipe(torch.ones(8, 4), target=torch.ones(8, 2)).backward()
    optimizer.step()


def equal_halves() -> nn.Sequential:
    """Each rank has layers that look like those of the other."""
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(4, 4) for _ in range(4)])


def layers_of_a_pipe(mesh: Mesh) -> list[str]:
    """A pipe of what a pipe has in this process is refused; one of the whole model goes on with the same values."""
    options: dict[str, Any] = {"schedule": "1f1b", "loss_fn": nn.functional.mse_loss}
    x = torch.arange(32.0).view(8, 4).sin()
    model, whole = equal_halves(), equal_halves()
    pipe, threads = Pipe(model, 3, mesh=mesh, **options), Pipe(whole, 3, devices=["cpu"] * 2, **options)
    for each in (pipe, threads):
        each(x, target=x).backward()
        torch.optim.SGD(each.parameters(), lr=0.5).step()
        each.zero_grad()
    told = []
    with pytest.raises(AttributeError) as error:
        pipe.chunks = 4
    told.append(str(error.value))
    wrapped = nn.Sequential(*[nn.Sequential(layer) for layer in pipe])
    for made_of in (nn.Sequential(*pipe), copy.deepcopy(pipe.partitions[0]), wrapped):
        with pytest.raises(ValueError, match="the ranks were started with different settings") as refused:
            Pipe(made_of, chunks=4, mesh=mesh, **options)
        told.append(str(refused.value))
    attached = pipework.attach(Blocks(), {"x": x, "labels": x}, chunks=2, mesh=mesh)
    with pytest.raises(AttributeError, match="make the model again, attach a pipe to it, and load a checkpoint"):
        attached.chunks = 4
    with pytest.raises(ValueError, match=r"1 of 2 processes: .*of a pipe made before, take the whole model"):
        Pipe(nn.Sequential(*attached), chunks=4, mesh=mesh, **options)
    looped = pipework.attach(Blocks(), {"x": x, "labels": x}, chunks=2, schedule="interleaved-1f1b", mesh=mesh)
    with pytest.raises(ValueError, match="gave up its values when a pipe was made of this model before"):
        Pipe(nn.Sequential(*looped), chunks=4, mesh=mesh, **options)
    reference = Pipe(whole, 4, devices=["cpu"] * 2, **options)
    for again in (Pipe(model, 4, mesh=mesh, **options), Pipe(nn.Sequential(*model), 4, mesh=mesh, **options)):
        assert torch.equal(again(x, target=x), reference(x, target=x))
    part, plain = nn.Sequential(*list(model)[:3]), nn.Sequential(*list(whole)[:3])  # each rank has its layers there
    with torch.no_grad():
        expected = Pipe(plain, 2, devices=["cpu"])(x)
        assert torch.equal(Pipe(part, 2, balance=[2, 1], mesh=mesh)(x, outputs="all"), expected)
    return told


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(equal_halves())

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return nn.functional.mse_loss(x, labels)


def rows() -> TensorDataset:
    torch.manual_seed(1)
    return TensorDataset(torch.randn(32, 4), torch.randn(32, 2))


def other_rows(mesh: Mesh) -> str:
    pipe = made(mesh)
    sampler = DistributedSampler(rows(), len(mesh.ranks), mesh.rank)
    x, y = next(iter(DataLoader(rows(), 8, sampler=sampler)))
    with pytest.raises(ValueError, match="was given other inputs than rank") as error:
        pipe(x, target=y)
    return str(error.value)


def other_targets_later(mesh: Mesh) -> str:
    pipe = made(mesh)
    for step in range(100):
        x, y = torch.ones(8, 4), torch.full((8, 2), float(step if step < 9 else step * 2 + mesh.rank))
        try:
            pipe(x if pipe.is_first else None, target=y).backward()
        except ValueError as error:
            return f"{step} {error}"
    return ""


def right_rows(mesh: Mesh) -> list[int]:
    pipe = made(mesh)
    sampler = pipe.sampler(rows(), seed=3)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for x, y in DataLoader(rows(), 4, sampler=sampler):
            pipe(x, target=y).backward()
    return list(sampler)


def crossed(mesh: Mesh) -> list[Any]:
    """Both pipes work in the same order; then each rank calls another one."""
    pipes = [made(mesh), made(mesh)]
    x, y = torch.ones(8, 4), torch.ones(8, 2)
    for pipe in pipes * 2:
        pipe(x, target=y).backward()
    begin = time.monotonic()
    try:
        for number in (0, 1) if mesh.rank else (1, 0):
            pipes[number](x, target=y)
    except PipelineError as error:
        return [error.kind, str(error), time.monotonic() - begin]
    return []


def warned(mesh: Mesh) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        Pipe(layers(), 1, mesh=mesh)
    return [str(each.message)[:11] for each in caught]


def backward_on_one(mesh: Mesh, outside: bool) -> str:
    """The last rank alone goes backward after the second call."""
    pipe = Pipe(layers(), 2, mesh=mesh) if outside else made(mesh)
    x, y = torch.ones(8, 4), torch.ones(8, 2)
    try:
        for step in range(3):
            loss = (pipe(x, outputs="all") - y).square().mean() if outside else pipe(x, target=y)
            if pipe.is_last or step != 1:
                loss.backward()
    except (ValueError, PipelineError) as error:
        return str(error)
    return ""


def other_last_backward(mesh: Mesh, wrong: str, end: str) -> str:
    """The last rank alone multiplies the last loss, or leaves its backward out; what comes then notices it."""
    pipe = made(mesh)
    x, y = torch.ones(8, 4), torch.ones(8, 2)
    for step in range(3):
        loss = pipe(x, target=y)
        if not (wrong == "missing" and pipe.is_last and step == 2):
            (loss * (0.5 if pipe.is_last and step == 2 else 1.0)).backward()
    ends: dict[str, Callable[[], object]] = {
        "clip": lambda: pipe.clip_grad_norm_(1.0),
        "save": lambda: pipework.save_checkpoint(tempfile.mkdtemp(), pipe, step=1),
        "call": lambda: pipe(x, target=y),
    }
    with pytest.raises((ValueError, PipelineError)) as error:
        ends[end]()
    return str(error.value)


def backward_on_one_replica(mesh: Mesh) -> str:
    pipe = made(mesh)
    try:
        for step in range(3):
            loss = pipe(torch.ones(8, 4), target=torch.ones(8, 2))
            if pipe.data_parallel_rank == 0 or step != 1:
                loss.backward()
    except (ValueError, PipelineError) as error:
        return str(error)
    return ""


def right_backwards(mesh: Mesh) -> None:
    model = layers()
    pipe = made(mesh, model)
    x, y = torch.ones(8, 4), torch.ones(8, 2)

    def loss() -> Tensor:
        return pipe(x, target=y)

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
    if pipe.is_last:  # for a look, too; what counts is the last
        looked_at = loss()
        (looked_at * 2.0).backward(retain_graph=True)
        pipe.zero_grad()
    else:
        looked_at = loss()
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
        gradients.append(pipe(x, target=y, **options))
        gradients[-1].backward()
        gradients += [each.grad for each in own]
    half = len(gradients) // 2
    assert all(torch.equal(one * 0.125, other) for one, other in zip(gradients[:half], gradients[half:], strict=True))
    with pytest.raises((ValueError, PipelineError), match=r"call the pipe differently in call .*: scales_loss is "):
        pipe(x, target=y, **({"loss_scale": 0.5} if pipe.is_first else {}))


def right_backwards_of_replicas(mesh: Mesh) -> None:
    pipe = made(mesh)
    before = pipe(torch.ones(8, 4), target=torch.ones(8, 2))
    for step in range(40):
        now = pipe(torch.ones(8, 4), target=torch.ones(8, 2))
        if step % 5:
            (before * (1.0 + pipe.data_parallel_rank)).backward()  # a mean over replicas by hand
        before = now
        with torch.no_grad():
            pipe(torch.ones(8, 4), target=torch.ones(8, 2))


def other_loss(mesh: Mesh, about: str) -> str:
    own = [nn.CrossEntropyLoss(), nn.CrossEntropyLoss(label_smoothing=0.1)][mesh.rank]
    options = {
        "loss_fn": {"loss_fn": own},
        "loss_weight": {"loss_fn": nn.MSELoss(), "loss_weight": len if mesh.rank else torch.numel},
    }[about]
    with pytest.raises(ValueError, match="the ranks were started with different settings") as error:
        Pipe(layers(), 2, mesh=mesh, **options)
    return str(error.value)


def tied_with_other_settings(mesh: Mesh) -> str:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    model[2].weight = model[0].weight
    pipe = Pipe(model, 2, mesh=mesh, loss_fn=lambda output, target: (output - target).abs().mean(), balance=[2, 1])
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1 * (1 + mesh.rank))
    for step in range(1, 4):
        with pytest.raises((ValueError, PipelineError)) if step == 2 else contextlib.nullcontext() as error:
            pipe(torch.ones(8, 4), target=torch.ones(8, 4)).backward()
            optimizer.step()
        if error is not None:
            return str(error.value)
    raise AssertionError("nothing was noticed")


def without_mesh(mesh: Mesh) -> list[list[str]]:
    told = []
    for options in ({}, {"devices": ["cpu"]}, {"mesh": mesh}, {}):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            Pipe(layers(), 2, schedule="1f1b", **options)
        told.append([str(each.message) for each in caught if "init" in str(each.message)])
        assert all(each.filename == __file__ for each in caught)
    return told


def unread_data(mesh: Mesh) -> None:
    """What differs is read on no rank."""
    pipe = made(mesh)
    x, y = torch.arange(32.0).view(8, 4).sin(), torch.arange(16.0).view(8, 2).sin()
    other = torch.full((8, 4), float(mesh.rank))
    for _ in range(2):
        pipe(other, target=y)  # as of an augmentation that each rank draws for itself
        pipe(x, target=other[:, :2])
        between = not (pipe.is_first or pipe.is_last)
        pipe(other if between else x, target=y if not between else other)
        pipe(x if pipe.is_first else float(mesh.rank), target=y)


def other_rows_with_one_target(mesh: Mesh, counted: bool) -> str:
    target = torch.arange(16.0).view(8, 2) if counted else torch.zeros(8, 2)
    with pytest.raises((ValueError, PipelineError)) as error:
        made(mesh)(torch.full((8, 4), float(mesh.rank)), target=target)
    return str(error.value)


def target_on_the_first(mesh: Mesh) -> str:
    pipe = made(mesh)
    x, y = torch.ones(8, 4), torch.ones(8, 2)
    pipe.eval()
    told = set()
    with torch.no_grad():
        for options in ({}, {"return_output": True}):
            with pytest.raises(
                ValueError, match="a target was given on rank 0, and none on rank 2, which has"
            ) as error:
                pipe(x, target=y if pipe.is_first else None, **options)
            told.add(str(error.value))
        with pytest.raises(ValueError, match="return_output=True is for pipe"):
            pipe(x, return_output=True)
    pipe.train()
    pipe(x, target=y).backward()  # nothing is broken
    outside = Pipe(layers(), 2, mesh=mesh)
    # A rank that comes later finds that another has raised it and has ended.
    with pytest.raises((ValueError, PipelineError), match=r"a target was given on rank 0|rank \d .* is gone"):
        outside(x, target=y if pipe.is_first else None, outputs="all")
    return told.pop()


def test_the_wrapped_model_does_not_answer_for_others(on_ranks: Run) -> None:
    on_ranks(2, stale)


def test_a_pipe_of_the_layers_that_a_pipe_has_here_is_refused(on_ranks: Run) -> None:
    for changed, *refused in on_ranks(2, layers_of_a_pipe):
        assert "'chunks' of a pipe cannot be changed: make a new Pipe of the whole model that this one was" in changed
        for text in refused:
            assert "made before (it has those of its own process only: make the next Pipe of the whole model" in text
            assert "first difference at 0: 0 on rank 0; " in text


def test_a_second_model_with_the_same_parameters_is_trained_by_its_own_optimizer(on_ranks: Run) -> None:
    on_ranks(2, second_model)


def test_other_rows_on_the_ranks_are_seen_in_the_first_step(start: Callable[..., Any]) -> None:
    for ended in start(2, other_rows).ended():
        assert ended.result.startswith("rank 1 was given other inputs than rank 0 in call 1")
        assert "take pipe.sampler(dataset)" in ended.result


def test_other_targets_in_later_steps_are_seen_now_and_then(start: Callable[..., Any]) -> None:
    for ended in start(2, other_targets_later).ended():
        assert ended.result.startswith("31 rank 1 was given other targets than rank 0 in call 32")


def test_the_sampler_gives_ranks_the_same_rows_and_replicas_others(on_ranks: Run) -> None:
    assert sorted(on_ranks(2, right_rows)[0]) == list(range(32))
    first, second, third, fourth = on_ranks(4, right_rows, init={"dp": 2})
    assert first == second
    assert third == fourth
    assert sorted(first + third) == list(range(32))


def test_what_all_processes_doubt_is_told_by_one(on_ranks: Run) -> None:
    assert on_ranks(4, warned, init={"dp": 2}) == [["chunks is 1"], [], [], []]


def test_a_backward_on_one_rank_alone_is_noticed_in_the_next_call(start: Callable[..., Any]) -> None:
    for ended in start(3, backward_on_one, outside=False).ended():
        assert "loss.backward() was called on rank 2 and not on rank " in ended.result, ended.errors
        assert "after call 2 of the pipe: the layers of rank " in ended.result


@pytest.mark.parametrize(("wrong", "end"), [("factor", "call"), ("factor", "save"), ("missing", "clip")])
def test_another_last_backward_on_one_rank_is_noticed(start: Callable[..., Any], wrong: str, end: str) -> None:
    words = {
        "factor": "the loss of call 3 of the pipe was multiplied by ",
        "missing": "and not on rank 2, after call 3 of the pipe",
    }
    for ended in start(3, other_last_backward, wrong=wrong, end=end).ended():
        assert words[wrong] in ended.result, ended.errors


def test_with_the_loss_outside_others_wait_for_the_backward(start: Callable[..., Any]) -> None:
    for ended in start(3, backward_on_one, outside=True).ended():
        assert "call 4 is 'backward' on rank 2" in ended.result or "'training step'" in ended.result, ended.errors


def test_a_backward_on_one_replica_alone_is_noticed(start: Callable[..., Any]) -> None:
    for ended in start(2, backward_on_one_replica, init={"dp": 2}).ended():
        assert "loss.backward() was called on some replicas of the pipe and not on others" in ended.result, ended.errors


def test_right_backwards_are_no_error(on_ranks: Run) -> None:
    on_ranks(3, right_backwards)


def test_right_backwards_of_replicas_are_no_error(on_ranks: Run) -> None:
    on_ranks(2, right_backwards_of_replicas, init={"dp": 2})


@pytest.mark.parametrize("about", ["loss_fn", pytest.param("loss_weight", marks=pytest.mark.thorough)])
def test_ranks_with_other_losses_are_refused(start: Callable[..., Any], about: str) -> None:
    words = {
        "loss_fn": "loss_fn, first difference at 1.label_smoothing: 0.0 on rank 0; 0.1 on rank 1",
        "loss_weight": 'numel" on rank 0; "len" on rank 1',
    }
    for ended in start(2, other_loss, about=about).ended():
        assert words[about] in ended.result, ended.errors


def test_tied_weights_that_optimizers_treat_differently_are_noticed(start: Callable[..., Any]) -> None:
    for ended in start(2, tied_with_other_settings).ended():
        assert (
            "the copies of the tied parameter '0.weight' (stages 0, 1) have different values on rank" in ended.result
        ), ended.errors


def test_pipes_that_ranks_call_in_another_order_are_named_within_seconds(start: Callable[..., Any]) -> None:
    for rank, ended in enumerate(start(2, crossed).ended()):
        kind, text, seconds = ended.result
        assert kind == "disagreement"
        waits = [f"rank {each} (stage {each})" for each in (rank, 1 - rank)]
        assert text.startswith(
            f"{waits[0]} waits in call 3 of pipe {2 - rank}, and {waits[1]} in call 3 of pipe {1 + rank}, which "
        )
        assert text.endswith("call all pipes in the same order on all ranks")
        assert seconds < 30


def test_a_pipe_without_the_mesh_is_doubted_once(on_ranks: Run) -> None:
    first, second = on_ranks(2, without_mesh)
    assert [len(each) for each in first] == [1, 0, 0, 0]
    assert "joined 2 processes, and this pipe has no mesh: each process trains the whole model, alone" in first[0][0]
    assert second == [[], [], [], []]


def test_what_no_rank_reads_may_differ(on_ranks: Run) -> None:
    on_ranks(3, unread_data)


@pytest.mark.parametrize("counted", [False, True])
def test_a_constant_or_counted_target_does_not_tell_rows(start: Callable[..., Any], counted: bool) -> None:
    for ended in start(2, other_rows_with_one_target, counted=counted).ended():
        assert "was given other inputs than rank" in ended.result, ended.errors


def test_a_target_on_the_first_rank_alone_breaks_nothing(on_ranks: Run) -> None:
    assert len({*on_ranks(3, target_on_the_first)}) == 1
