"""What is easily forgotten where workers are processes: order, what changes in place, what only one of them does."""

import contextlib
import copy
import gc
import signal
import threading
import warnings
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipework import (
    Mesh,
    Pipe,
    PipelineError,
    PipeWarning,
    executor,
    load_checkpoint,
    pop,
    save_checkpoint,
    skippable,
    stash,
)
from tests.schedule.orders_text import schedule_of

Run = Callable[..., list[Any]]

BACKWARDS = schedule_of("0F1 0F0 0B0 0B1\n1F1 1F0 1B0 1B1")
WANDERING = schedule_of("0F0 2F0 0F1 2F1 2B0 0B0 2B1 0B1\n1F0 3F0 1F1 3F1 3B0 1B0 3B1 1B1", placement=(0, 1, 0, 1))


@dataclass
class Count:
    number: int


class Counting(nn.Module):
    """Passes on an object that it changes all the time."""

    def __init__(self) -> None:
        super().__init__()
        self.count = Count(0)

    def forward(self, x: Tensor) -> tuple[Tensor, Count]:
        self.count.number += 1
        return x, self.count


class Reading(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[int] = []

    def forward(self, x: Tensor, count: Count) -> Tensor:
        self.seen.append(count.number)
        count.number = -1  # of no concern to anybody else
        return x


class Tied(nn.Module):
    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight


class Recurrent(nn.LSTM):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)[0]


def square(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


def two_ranks(mesh: Mesh) -> None:
    x, y = torch.randn(8, 3), torch.zeros(8, 3)

    model = nn.Sequential(Counting(), Reading())
    pipe = Pipe(model, chunks=4, mesh=mesh, balance=[1, 1])
    with torch.no_grad():
        for _ in range(2):
            pipe(x)
    if pipe.is_last:
        assert model[1].seen == list(range(1, 9))

    schedule = BACKWARDS
    plain = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    threads = Pipe(copy.deepcopy(plain), 2, schedule=schedule, devices=["cpu", "cpu"], loss_fn=square)
    pipe = Pipe(plain, 2, schedule=schedule, mesh=mesh, loss_fn=square)
    for rows in (8, 5):
        expected, output = threads(x[:rows], target=y[:rows], return_output=True)
        loss, mine = pipe(x[:rows], target=y[:rows], return_output=True, outputs="all")
        assert torch.equal(loss, expected)
        assert torch.equal(mine, output)

    pipe = Pipe(nn.Sequential(Recurrent(3, 3), nn.Linear(3, 3)), 2, mesh=mesh, balance=[1, 1], loss_fn=square)
    x = torch.randn(8, 5, 3)
    with warnings.catch_warnings():
        warnings.simplefilter("error", PipeWarning)
        with pytest.raises(PipeWarning, match="batch_first") if pipe.is_first else contextlib.nullcontext():
            pipe(x, target=x)
        pipe(x, target=x).backward()


def without_data(mesh: Mesh) -> list[str]:
    """The target is given to the wrong rank, to none, or inputs to none; only the last is not seen by all alike."""
    x, y = torch.randn(8, 3), torch.zeros(8, 3)
    layers = [nn.Linear(3, 3) for _ in range(2)]
    pipe = Pipe(nn.Sequential(*layers), 2, mesh=mesh, schedule="1f1b", loss_fn=square)
    outside = Pipe(nn.Sequential(*layers), 2, mesh=mesh)
    told = []
    for training in (
        lambda: pipe(x, target=y if pipe.is_first else None),
        lambda: pipe(x, target=y if pipe.is_first else None, outputs="all"),
        lambda: outside(x),
    ):
        with pytest.raises(
            ValueError, match=r"it is read on rank 1, where pipe\.is_last, and it was None there"
        ) as caught:
            training()
        told.append(str(caught.value))
    pipe(x if pipe.is_first else None, target=y if pipe.is_last else None).backward()  # nothing is broken
    # The first rank fails next. The last must have left the call before, or it hears of the failure there.
    mesh.store.set(f"{mesh.rank} has left", "")
    mesh.store.wait(["1 has left"])
    with pytest.raises((TypeError, PipelineError), match="do not have any tensors") as error:
        pipe(None, target=y)
    assert type(error.value) is (TypeError if pipe.is_first else PipelineError)
    assert "they are read on rank 0, where pipe.is_first, and were None there" in str(error.value)
    return told


def table(mesh: Mesh) -> str:
    pipe = Pipe(nn.Sequential(*[nn.Linear(3, 3) for _ in range(5)]), 4, mesh=mesh, schedule="1f1b", balance=[3, 2])
    return repr(pipe)


def table_with_tied_layers(mesh: Mesh) -> list[str]:
    first, second = nn.Linear(3, 3), nn.Linear(3, 3)
    layers = nn.Sequential(first, nn.Tanh(), second, second, first)
    return repr(Pipe(layers, 4, mesh=mesh, balance=[2, 3])).splitlines()


def table_of_several(mesh: Mesh) -> str:
    layers = nn.Sequential(*[nn.Linear(3, 3) for _ in range(4)])
    return repr(Pipe(layers, 4, mesh=mesh, schedule="zb-v", loss_fn=square, balance=[1] * 4))


def without_parameters(mesh: Mesh, folder: str) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.Tanh(), nn.ReLU())
    plain, (x, y) = copy.deepcopy(model), torch.randn(2, 8, 3)
    pipe = Pipe(model, mesh=mesh, loss_fn=square, balance=[2, 2])
    if pipe.is_last:
        with pytest.raises(ValueError, match="optimizer got an empty parameter list"):
            torch.optim.AdamW(pipe.parameters())
    optimizer = torch.optim.AdamW([{"params": list(pipe.parameters())}])
    reference = torch.optim.AdamW(plain.parameters())
    for step in range(3):
        pipe(x, target=y).backward()
        pipe.clip_grad_norm_(1.0)
        square(plain(x), y).backward()
        nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        for each in (optimizer, reference):
            each.step()
            each.zero_grad()
        if step == 1:
            save_checkpoint(folder, pipe, optimizer, step=1)
            assert load_checkpoint(folder, pipe, optimizer) is not None
    for name, parameter in pipe.named_parameters():
        assert torch.equal(parameter, plain.get_parameter(name))
    Pipe(nn.Sequential(nn.Tanh(), nn.Tanh()), mesh=mesh)  # nothing to train anywhere


def frozen_on_one(mesh: Mesh) -> str:
    x, y = torch.randn(8, 3), torch.zeros(8, 3)
    weight = nn.Parameter(torch.randn(3, 3))
    pipe = Pipe(nn.Sequential(Tied(weight), nn.Linear(3, 3), Tied(weight)), 2, mesh=mesh, loss_fn=square)
    weight.requires_grad_(False)
    pipe(x, target=y).backward()
    assert weight.grad is None
    weight.requires_grad_(mesh.rank == 0)
    with pytest.raises((ValueError, PipelineError), match="is trained in") as caught:  # its own, or the other's first
        pipe(x, target=y)
    return str(caught.value)


def test_two_ranks(on_ranks: Run) -> None:
    on_ranks(2, two_ranks)


def test_inputs_and_targets_that_are_missing_where_they_are_read(start: Callable[..., Any]) -> None:
    first, last = start(2, without_data).ended()
    for each in (first, last):
        assert each.result is not None, each.errors
        inside, everywhere, outside = each.result
        for text in (inside, everywhere):
            assert "schedule '1f1b' computes the loss inside and got no target: call pipe(x, target=y) on every" in text
            assert "it is read on rank 1, where pipe.is_last, and it was None there" in text
        assert 'call pipe(x, outputs="all")' in outside
        assert "give Pipe a loss_fn and call pipe(x, target=y)" in outside


def test_the_table_shows_all_partitions(on_ranks: Run) -> None:
    first, last = on_ranks(2, table)
    assert first.splitlines()[:4] == [
        "Pipe: 5 layers in 2 partitions; this process has 1 partition",
        "  partition  device       layers      parameters  bytes",
        "          0  cpu, rank 0  0 .. 2 (3)          36  144 B",
        "          1  rank 1       (2)                  -      -",
    ]
    assert last.splitlines()[2:4] == [
        "          0  rank 0       (3)                  -      -",
        "          1  cpu, rank 1  3 .. 4 (2)          24   96 B",
    ]
    for lines in on_ranks(2, table_with_tied_layers):
        assert lines[-1] == (
            "partitions 0, 1 share 2 parameters in different processes: the last bit of the gradient may differ from "
            "the un-partitioned model's"
        )
    ranks = [line.split()[1:4] for line in on_ranks(2, table_of_several)[1].splitlines()[2:6]]
    assert ranks == [["rank", "0", "(1)"], ["cpu,", "rank", "1"], ["cpu,", "rank", "1"], ["rank", "0", "(1)"]]


def test_a_rank_without_parameters_gives_its_optimizer_an_empty_group(on_ranks: Run, tmp_path: Path) -> None:
    on_ranks(2, without_parameters, folder=str(tmp_path))


def test_a_tied_parameter_that_is_frozen_on_one_rank_only(start: Callable[..., Any]) -> None:
    for ended in start(2, frozen_on_one).ended():
        assert "stages 0, 1 share is trained in 0 and not in 1" in ended.result, ended.errors


@skippable(stash=["skip"])
class Down(nn.Module):
    def forward(self, x: Tensor) -> Any:
        yield stash("skip", x)
        return x


@skippable(pop=["skip"])
class Up(nn.Module):
    def forward(self, x: Tensor) -> Any:
        skip = yield pop("skip")
        return x + skip


def overwriting(mesh: Mesh) -> None:
    skipping = [Down(), nn.Identity(), nn.ReLU(inplace=True), Up()]
    pipe = Pipe(nn.Sequential(nn.Linear(3, 3), *skipping), 2, mesh=mesh, balance=[2, 1, 1, 1], schedule=WANDERING)
    with pytest.raises((RuntimeError, PipelineError), match="stage 2 has changed skip tensor 'skip' in place"):
        pipe(torch.randn(4, 3), outputs="all")


def test_what_is_on_its_way_as_a_skip_is_not_overwritten(start: Callable[..., Any]) -> None:
    for ended in start(2, overwriting).ended():
        assert ended.code == 0, ended.errors


class Failing(nn.Module):
    """Keeps weak references to what it got, and fails in its third forward."""

    def __init__(self) -> None:
        super().__init__()
        self.got: list[weakref.ref[Tensor]] = []

    def forward(self, x: Tensor) -> Tensor:
        self.got.append(weakref.ref(x))
        if len(self.got) == 3:
            raise ValueError("the third is too much")
        return x


def failing_step(mesh: Mesh) -> None:
    failing = Failing()
    pipe = Pipe(nn.Sequential(nn.Linear(3, 3), failing), 4, mesh=mesh, loss_fn=square, schedule="1f1b")
    before = {id(tensor) for tensor in gc.get_objects() if type(tensor) is Tensor}
    with pytest.raises((ValueError, PipelineError), match="the third is too much"):
        pipe(torch.randn(8, 3), target=torch.zeros(8, 3))
    gc.collect()
    left = [tensor for tensor in gc.get_objects() if type(tensor) is Tensor and tensor.shape == (2, 3)]
    assert all(id(tensor) in before for tensor in left)
    assert all(reference() is None for reference in failing.got)


def test_a_step_that_has_failed_keeps_no_tensors(start: Callable[..., Any]) -> None:
    for ended in start(2, failing_step).ended():
        assert ended.code == 0, ended.errors


def small_training(mesh: Mesh) -> tuple[Pipe, Tensor, Tensor]:
    """A pipe of two layers, a mini-batch and its target."""
    pipe = Pipe(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)), 2, mesh=mesh, loss_fn=square)
    return pipe, torch.randn(4, 3), torch.zeros(4, 3)


def two_threads(mesh: Mesh) -> str:
    pipe, x, y = small_training(mesh)
    messages = []
    inside, over = threading.Event(), threading.Event()

    def hook(*_: object) -> None:
        inside.set()
        over.wait(60)

    def other() -> None:
        inside.wait(60)
        try:
            pipe(x, target=y)
        except RuntimeError as error:
            messages.append(str(error))
        over.set()

    handle = next(pipe.children()).register_forward_pre_hook(hook)
    thread = threading.Thread(target=other)
    thread.start()
    pipe(x, target=y).backward()
    thread.join()
    handle.remove()
    pipe(x, target=y).backward()  # nothing is broken
    return messages[0]


def test_calls_from_two_threads_are_refused(on_ranks: Run) -> None:
    for message in on_ranks(2, two_threads):
        assert "begins in the middle of another call of it, by another thread" in message


def in_the_middle(mesh: Mesh) -> str:
    pipe, x, y = small_training(mesh)
    messages: list[str] = []
    inside, over = threading.Event(), threading.Event()

    def hook(*_: object) -> None:
        if not inside.is_set():
            inside.set()
            signal.raise_signal(signal.SIGUSR2)  # the main thread waits for the workers, and is interrupted there
            over.wait(60)

    def handler(*_: object) -> None:
        try:
            pipe.clip_grad_norm_(1.0)
        except RuntimeError as error:
            messages.append(str(error))
        over.set()

    signal.signal(signal.SIGUSR2, handler)
    handle = next(pipe.children()).register_forward_pre_hook(hook)
    pipe(x, target=y).backward()
    handle.remove()
    pipe(x, target=y).backward()
    return messages[0]


def test_a_call_in_the_middle_of_another_is_refused(on_ranks: Run) -> None:
    for message in on_ranks(2, in_the_middle):
        assert "a clip_grad_norm_ of this pipe begins in the middle of another call of it" in message


def evaluates_alone(mesh: Mesh) -> str:
    pipe, x, y = small_training(mesh)
    pipe(x, target=y).backward()
    pipe.train(pipe.data_parallel_rank == 0)
    torch.set_grad_enabled(pipe.data_parallel_rank == 0)
    with pytest.raises(PipelineError) as caught:
        pipe(x, target=y)
    return caught.value.kind


def test_replicas_that_call_something_else_are_told_so(start: Callable[..., Any]) -> None:
    for ended in start(4, evaluates_alone, init={"dp": 2}).ended():
        assert ended.result == "disagreement", ended.errors


def fails_while_made(mesh: Mesh) -> str:
    module = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    before = threading.active_count()
    weight = module[0].weight
    if mesh.rank == 0:  # its value cannot be sent; the other rank waits for it

        class Unwilling(nn.Parameter):
            def detach(self) -> Tensor:
                raise ValueError("this one does not travel")

        weight = Unwilling(torch.zeros(3, 3))
    with pytest.raises((ValueError, PipelineError), match="this one does not travel") as caught:
        Pipe(nn.Sequential(Tied(weight), Tied(weight)), mesh=mesh)
    assert threading.active_count() == before, threading.enumerate()
    return type(caught.value).__name__


def test_a_pipe_that_cannot_be_made_leaves_nothing(start: Callable[..., Any]) -> None:
    every = start(2, fails_while_made).ended()
    assert [ended.result for ended in every] == ["ValueError", "PipelineError"], [ended.errors for ended in every]


def frozen_elsewhere(mesh: Mesh) -> None:
    model = nn.Sequential(*[nn.Linear(3, 3) for _ in range(4)])
    others = model[2 - 2 * mesh.rank :][:2]
    others.requires_grad_(False)
    pipe = Pipe(model, 2, mesh=mesh, loss_fn=square, balance=[2, 2])
    own = pipe.partitions[0][0]
    for learns in (True, False, True):  # and what is held here may be frozen and thawed between any two steps
        own.requires_grad_(learns)
        pipe.zero_grad()
        pipe(torch.randn(8, 3), target=torch.zeros(8, 3)).backward()
        assert {name for name, p in pipe.named_parameters() if p.grad is None} == (
            set() if learns else {f"{2 * mesh.rank}.weight", f"{2 * mesh.rank}.bias"}
        )


def test_what_another_rank_holds_may_be_frozen_here(on_ranks: Run) -> None:
    on_ranks(2, frozen_elsewhere)


class Marked(Tensor):
    """What operators make of it is of its class."""


class Marking(nn.Module):
    def __init__(self, marks: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.marks = marks

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x.as_subclass(Marked) if self.marks else x * 2, self.weight


class Classes(nn.Module):
    """Notes what comes in."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[str] = set()

    def forward(self, given: tuple[Tensor, Tensor]) -> Tensor:
        self.seen |= {type(each).__name__ for each in given}
        return given[0] * given[1]


def own_classes(mesh: Mesh, schedule: str) -> str:
    x, y = torch.randn(8, 3), torch.zeros(8, 3)
    options = {"schedule": schedule, "loss_fn": square, "balance": [1, 1]}
    threads = Pipe(nn.Sequential(Marking(True), Classes()), 2, devices=["cpu", "cpu"], **options)
    threads(x, target=y)
    assert threads[1].seen == {"Marked", "Tensor"}
    plain = nn.Sequential(Marking(False), Classes())
    Pipe(plain, 2, mesh=mesh, **options)(x, target=y).backward()
    if mesh.rank:
        assert plain[1].seen == {"Tensor"}
    else:
        assert plain[0].weight.grad is not None
    pipe = Pipe(nn.Sequential(Marking(True), Classes()), 2, mesh=mesh, **options)
    with pytest.raises(PipelineError if mesh.rank else TypeError) as caught:
        pipe(x, target=y)
    return str(caught.value)


def test_a_tensor_of_a_class_of_its_own_is_refused_between_ranks(start: Callable[..., Any]) -> None:
    for ended in start(2, own_classes, schedule="zb-h1").ended():
        assert "Marked cannot be sent to another process" in ended.result, ended.errors


class HalfUsed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
        self.used_by_one = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.used * (self.used_by_one if x[0, 0] > 0 else 1.0)


def two_replicas(mesh: Mesh) -> None:
    module = HalfUsed()
    pipe = Pipe(nn.Sequential(module), mesh=mesh, loss_fn=square)
    pipe(torch.full((4, 3), 1.0 if mesh.rank else -1.0), target=torch.zeros(4, 3)).backward()
    assert module.unused.grad is None
    assert module.used.grad is not None
    assert module.used_by_one.grad is not None


def test_a_parameter_that_no_replica_has_used_gets_no_gradient(on_ranks: Run) -> None:
    on_ranks(2, two_replicas, init={"dp": 2})


def replaced_layer(mesh: Mesh) -> list[str]:
    pipe, x, y = small_training(mesh)
    pipe(x, target=y).backward()
    setattr(pipe, next(iter(pipe._modules)), nn.Linear(3, 3))
    gc.collect()
    left = [thread.name for thread in threading.enumerate() if thread.name.startswith("pipework worker")]
    for parameter in pipe.parameters():
        parameter.grad = torch.ones_like(parameter)
    pipe.clip_grad_norm_(1.0)  # with workers of their own, before the next step
    pipe(x, target=y).backward()
    return left


def test_replacing_a_layer_ends_the_old_workers(on_ranks: Run) -> None:
    assert on_ranks(2, replaced_layer) == [[], []]


def clip_without_workers(mesh: Mesh) -> None:
    def no_engine(*_: object, **__: object) -> None:
        raise MemoryError("no memory for the engine")

    if mesh.rank == 1:
        executor.make_engine = no_engine  # type: ignore[assignment]
    with pytest.raises(MemoryError if mesh.rank == 1 else PipelineError, match="no memory for the engine"):
        small_training(mesh)[0].clip_grad_norm_(1.0)  # the other rank may fail while this one makes the pipe


def test_an_engine_that_cannot_be_made_is_reported(start: Callable[..., Any]) -> None:
    for ended in start(2, clip_without_workers).ended():
        assert ended.code == 0, ended.errors


class TakesAll(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise MemoryError("all of it")


def run_out_of_memory(mesh: Mesh) -> list[str]:
    layers = nn.Sequential(nn.Linear(4, 4), TakesAll(4, 4))
    pipe = Pipe(layers, 2, "never", balance=[1, 1], loss_fn=nn.functional.mse_loss, mesh=mesh)
    with pytest.raises(MemoryError if mesh.rank == 1 else PipelineError) as caught:
        pipe(torch.ones(4, 4), target=torch.ones(4, 4))
    return list(getattr(caught.value, "__notes__", ()))


def test_a_rank_without_memory_says_what_its_own_stages_hold(on_ranks: Run) -> None:
    _, notes = on_ranks(2, run_out_of_memory)
    (held,) = [note for note in notes if "memory of the stages" in note]
    heading, columns, row, _ = held.splitlines()
    assert "out of memory on cpu in action F of stage 1, micro-batch 0" in heading
    assert (columns.split()[0], row.split()[:4]) == ("stage", ["1", "cpu", "80", "B"])
