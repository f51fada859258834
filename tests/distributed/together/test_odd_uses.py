"""What is easily forgotten where workers are processes: order, what changes in place, what only one of them does."""

import contextlib
import copy
import gc
import re
import signal
import threading
import weakref
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

from pipework import HostOptimizer, Mesh, Pipe, PipelineError, load_checkpoint, save_checkpoint
from tests.distributed.together.alike import Tied, both, refused, square
from tests.helpers import Overwrite, Pop, Stash, WithAView
from tests.jobs import runs_on
from tests.schedule.orders_text import schedule_of

BACKWARDS = schedule_of("0F1 0F0 0B0 0B1\n1F1 1F0 1B0 1B1")
WANDERING = schedule_of("0F0 2F0 0F1 2F1 2B0 0B0 2B1 0B1\n1F0 3F0 1F1 3F1 3B0 1B0 3B1 1B1", placement=(0, 1, 0, 1))


def linears(count: int = 2) -> nn.Sequential:
    return nn.Sequential(*[nn.Linear(3, 3) for _ in range(count)])


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


@runs_on(2)
def test_an_object_that_changes_all_the_time_arrives_as_it_was(mesh: Mesh) -> None:
    model = nn.Sequential(Counting(), Reading())
    pipe = Pipe(model, chunks=4, mesh=mesh, balance=[1, 1])
    with torch.no_grad():
        for _ in range(2):
            pipe(torch.randn(8, 3))
    if pipe.is_last:
        assert model[1].seen == list(range(1, 9))


@runs_on(2)
def test_micro_batches_in_another_order(mesh: Mesh) -> None:
    x, y = torch.randn(8, 3), torch.zeros(8, 3)
    pipe, threads = both(linears(), mesh, 2, schedule=BACKWARDS, loss_fn=square)
    for rows in (8, 5):
        expected, output = threads(x[:rows], target=y[:rows], return_output=True)
        loss, mine = pipe(x[:rows], target=y[:rows], return_output=True, outputs="all")
        assert torch.equal(loss, expected)
        assert torch.equal(mine, output)


@runs_on(2)
def test_values_that_share_memory_share_it_in_another_process(mesh: Mesh) -> None:
    """A layer changes one of them in place: the other one changes, too, and is refused where a gradient is wanted."""
    pipe, threads = both(nn.Sequential(WithAView(3, 3), Overwrite(), nn.Linear(5, 3)), mesh, 2, "never", balance=[1, 2])
    x = torch.randn(8, 3)
    for way in (pipe, threads):
        for name, parameter in way.named_parameters():
            parameter.requires_grad_(name.startswith("2."))
    expected = threads(x)
    for rows in (8, 8, 5):  # the second has the header of the first
        assert torch.equal(pipe(x[:rows], outputs="all"), expected[:rows])
    for way in (pipe, threads):
        way.requires_grad_(requires_grad=True)
        with refused("share memory", RuntimeError):
            way(x, outputs="all")


@runs_on(2)
def test_inputs_and_targets_that_are_missing_where_they_are_read(mesh: Mesh) -> None:
    """The target is given to the wrong rank, to none, or inputs to none; only the last is not seen by all alike."""
    x, y = torch.randn(8, 3), torch.zeros(8, 3)
    layers = linears()
    pipe = Pipe(layers, 2, mesh=mesh, schedule="1f1b", loss_fn=square)
    outside = Pipe(layers, 2, mesh=mesh)
    there = r"it is read on rank 1, where pipe\.is_last, and it was None there"
    inside = r"schedule '1f1b' computes the loss inside and got no target: call pipe\(x, target=y\) on every"
    for words, training in (
        (inside, lambda: pipe(x, target=y if pipe.is_first else None)),
        (inside, lambda: pipe(x, target=y if pipe.is_first else None, outputs="all")),
        (r'call pipe\(x, outputs="all"\)', lambda: outside(x)),
    ):
        with pytest.raises(ValueError, match=f"(?s)(?=.*{there}).*{words}"):
            training()
    with (
        torch.no_grad(),
        pytest.raises(ValueError, match="a target was given on the first rank of the pipe, and none on"),
    ):
        pipe(x, target=y if pipe.is_first else None)
    pipe(x if pipe.is_first else None, target=y if pipe.is_last else None).backward()  # nothing is broken
    # The first rank fails next. The last must have left the call before, or it hears of the failure there.
    mesh.store.set("the last has left" if pipe.is_last else "the first has left", "")
    mesh.store.wait(["the last has left"])
    with pytest.raises(TypeError if pipe.is_first else PipelineError, match="do not have any tensors: got NoneType"):
        pipe(None, target=y)


@runs_on(2)
def test_the_table_shows_all_partitions(mesh: Mesh) -> None:
    lines = repr(Pipe(linears(5), 4, mesh=mesh, schedule="1f1b", balance=[3, 2])).splitlines()
    assert lines[0] == "Pipe: 5 layers in 2 partitions; this process has 1 partition"
    first, last = ("0  cpu, rank 0  0 .. 2 (3)          36  144 B", "1  rank 1       (2)                  -      -")
    if mesh.rank:
        first, last = ("0  rank 0       (3)                  -      -", "1  cpu, rank 1  3 .. 4 (2)          24   96 B")
    heading = "  partition  device       layers      parameters  bytes"
    assert lines[1:4] == [heading, f"          {first}", f"          {last}"]
    lines = repr(Pipe(linears(4), 4, mesh=mesh, schedule="zb-v", loss_fn=square, balance=[1] * 4)).splitlines()
    assert [re.findall(r"rank \d", line) for line in lines[2:6]] == [[f"rank {n}"] for n in (0, 1, 1, 0)]
    assert ["cpu" in line for line in lines[2:6]] == [mesh.rank == n for n in (0, 1, 1, 0)]


@runs_on(2)
def test_a_rank_without_parameters_gives_its_optimizer_an_empty_group(mesh: Mesh, folder: str) -> None:
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


@runs_on(2)
def test_a_tied_parameter_that_is_frozen_on_one_rank_only(mesh: Mesh) -> None:
    x, y = torch.randn(8, 3), torch.zeros(8, 3)
    weight = nn.Parameter(torch.randn(3, 3))
    pipe = Pipe(nn.Sequential(Tied(weight), nn.Linear(3, 3), Tied(weight)), 2, mesh=mesh, loss_fn=square)
    weight.requires_grad_(False)
    pipe(x, target=y).backward()
    assert weight.grad is None
    weight.requires_grad_(mesh.rank == 0)
    with refused("stages 0, 1 share is trained in 0 and not in 1"):  # its own, or the other's first
        pipe(x, target=y)


@runs_on(2)
def test_what_is_on_its_way_as_a_skip_is_not_overwritten(mesh: Mesh) -> None:
    skipping = [Stash(), nn.Identity(), nn.ReLU(inplace=True), Pop()]
    pipe = Pipe(nn.Sequential(nn.Linear(3, 3), *skipping), 2, mesh=mesh, balance=[2, 1, 1, 1], schedule=WANDERING)
    with refused("stage 2 has changed skip tensor 'skip' in place", RuntimeError):
        pipe(torch.randn(4, 3), outputs="all")


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


@runs_on(2)
def test_a_step_that_has_failed_keeps_no_tensors(mesh: Mesh) -> None:
    failing = Failing()
    pipe = Pipe(nn.Sequential(nn.Linear(3, 3), failing), 4, mesh=mesh, loss_fn=square, schedule="1f1b")
    before = {id(tensor) for tensor in gc.get_objects() if type(tensor) is Tensor}
    with refused("the third is too much"):
        pipe(torch.randn(8, 3), target=torch.zeros(8, 3))
    gc.collect()
    left = [tensor for tensor in gc.get_objects() if type(tensor) is Tensor and tensor.shape == (2, 3)]
    assert all(id(tensor) in before for tensor in left)
    assert all(reference() is None for reference in failing.got)


def small_training(mesh: Mesh) -> tuple[Pipe, Tensor, Tensor]:
    """A pipe of two layers, a mini-batch and its target."""
    pipe = Pipe(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)), 2, mesh=mesh, loss_fn=square)
    return pipe, torch.randn(4, 3), torch.zeros(4, 3)


@pytest.mark.parametrize("by", ["another thread", "a signal"])
@runs_on(2)
def test_a_call_in_the_middle_of_another_is_refused(mesh: Mesh, by: str) -> None:
    """Of the same pipe, or of another one of this mesh."""
    pipe, x, y = small_training(mesh)
    other, *_ = small_training(mesh)
    messages: list[str] = []
    inside, over = threading.Event(), threading.Event()

    def hook(*_: object) -> None:
        if not inside.is_set():
            inside.set()
            if by == "a signal":
                signal.raise_signal(signal.SIGUSR2)  # the main thread waits for the workers, and is interrupted there
            over.wait(60)

    def call(*_: object) -> None:
        inside.wait(60)
        try:
            pipe.clip_grad_norm_(1.0) if by == "a signal" else other(x, target=y)
        except RuntimeError as error:
            messages.append(str(error))
        over.set()

    before = signal.signal(signal.SIGUSR2, call)
    handle = next(pipe.children()).register_forward_pre_hook(hook)
    thread = threading.Thread(target=call)
    if by == "another thread":
        thread.start()
    pipe(x, target=y).backward()
    handle.remove()
    signal.signal(signal.SIGUSR2, before)
    assert over.is_set()
    for each in (pipe, other):
        each(x, target=y).backward()  # nothing is broken
    what = "clip_grad_norm_" if by == "a signal" else "training step"
    assert f"a {what} of this pipe begins in the middle of another call of it, or of another pipe" in messages[0]


@runs_on(4, dp=2)
def test_replicas_that_call_something_else_are_told_so(mesh: Mesh) -> None:
    pipe, x, y = small_training(mesh)
    pipe(x, target=y).backward()
    pipe.train(pipe.data_parallel_rank == 0)
    torch.set_grad_enabled(pipe.data_parallel_rank == 0)
    with pytest.raises(PipelineError) as caught:
        pipe(x, target=y)
    assert caught.value.kind == "disagreement"


class Unwilling(nn.Parameter):
    def detach(self) -> Tensor:
        raise ValueError("this one does not travel")


@runs_on(2)
def test_a_pipe_that_cannot_be_made_leaves_nothing(mesh: Mesh) -> None:
    """The first rank cannot send a value, for which the other one waits."""
    before = {*threading.enumerate()}
    weight = nn.Parameter(torch.zeros(3, 3)) if mesh.rank else Unwilling(torch.zeros(3, 3))
    with pytest.raises(PipelineError if mesh.rank else ValueError, match="this one does not travel"):
        Pipe(nn.Sequential(Tied(weight), Tied(weight)), mesh=mesh)
    assert {*threading.enumerate()} <= before


@runs_on(2)
def test_what_another_rank_holds_may_be_frozen_here(mesh: Mesh) -> None:
    model = linears(4)
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


@runs_on(2)
def test_replacing_a_layer_ends_the_old_workers(mesh: Mesh) -> None:
    before = {*threading.enumerate()}  # perhaps workers of another test's pipe
    pipe, x, y = small_training(mesh)
    pipe(x, target=y).backward()
    setattr(pipe, next(iter(pipe._modules)), nn.Linear(3, 3))
    gc.collect()
    started = {*threading.enumerate()} - before
    assert not [thread for thread in started if thread.name.startswith("pipework worker")]
    for parameter in pipe.parameters():
        parameter.grad = torch.ones_like(parameter)
    pipe.clip_grad_norm_(1.0)  # with workers of their own, before the next step
    pipe(x, target=y).backward()


class TakesAll(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise MemoryError("all of it")


@runs_on(2)
def test_a_rank_without_memory_says_what_its_own_stages_hold(mesh: Mesh) -> None:
    layers = nn.Sequential(nn.Linear(4, 4), TakesAll(4, 4))
    pipe = Pipe(layers, 2, "never", balance=[1, 1], loss_fn=square, mesh=mesh)
    with pytest.raises(MemoryError if mesh.rank == 1 else PipelineError) as caught:
        pipe(torch.ones(4, 4), target=torch.ones(4, 4))
    if mesh.rank == 1:
        (held,) = [note for note in caught.value.__notes__ if "memory of the stages" in note]
        heading, columns, row, _ = held.splitlines()
        assert "out of memory in stage 1, micro-batch 0, action F" in heading
        assert (columns.split()[0], row.split()[:4]) == ("stage", ["1", "cpu", "80", "B"])


def stepped(mesh: Mesh, early: bool) -> tuple[list[Tensor], list[int]]:
    """The parameters of a rank after three steps, and how many steps had begun when each backward returned."""
    torch.manual_seed(0)
    model, begun = linears(6), []
    model[5].weight = model[0].weight
    schedule, balance = ("1f1b", [6]) if mesh.data_parallel_size > 1 else ("interleaved-1f1b", [2, 1, 1, 2])
    pipe = Pipe(model, 4, balance=balance, mesh=mesh, schedule=schedule, loss_fn=nn.functional.mse_loss)
    optimizer = HostOptimizer(pipe.parameters(), torch.optim.AdamW, lr=0.1, fused=True)
    for step in range(3):
        x = torch.full((8, 3), step + 1.0 + mesh.data_parallel_rank).cumsum(0)
        with optimizer.step_in_backward(pipe) if early else contextlib.nullcontext():
            pipe(x, target=x.tanh()).backward()
            begun += [len(optimizer._early._used)] if optimizer._early is not None else []
        if not early:
            optimizer.step()
        optimizer.zero_grad()
    return list(pipe.parameters()), begun


def check_early_steps(mesh: Mesh, count: int) -> None:
    (plain, _), (own, begun) = stepped(mesh, early=False), stepped(mesh, early=True)
    assert all(map(torch.equal, plain, own))
    assert begun == [count] * 3


@runs_on(2)
def test_steps_begin_in_the_backward_of_each_rank(mesh: Mesh) -> None:
    check_early_steps(mesh, 5)  # without the tied weight


@runs_on(2, dp=2)
def test_steps_wait_for_the_mean_over_replicas(mesh: Mesh) -> None:
    check_early_steps(mesh, 0)
