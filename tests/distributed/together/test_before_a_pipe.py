"""What comes before a pipe of processes, also another pipe: all ranks get the gradients of its inputs."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from pipework import Mesh, MicroBatches, Pipe, PipelineError
from pipework.distributed.transport.rank_transport import RankTransport

Run = Callable[..., list[Any]]


def layers(first: int = 6, last: int = 3) -> nn.Sequential:
    hidden = [layer for _ in range(2) for layer in (nn.Linear(8, 8), nn.Tanh(), nn.Dropout(0.2))]
    return nn.Sequential(nn.Linear(first, 8), *hidden, nn.Linear(8, last))


class Net:
    """A module, a pipe, another module and a second pipe, one after the other.

    Args:
        workers: arguments of the pipes.
        schedule: of the second pipe; its loss is inside unless this is "gpipe".
    """

    def __init__(self, workers: dict[str, Any], schedule: str) -> None:
        torch.manual_seed(3)
        self.before, self.between = nn.Linear(4, 6), nn.Linear(5, 6)
        self.first = Pipe(layers(last=5), 4, **workers)
        self.second = Pipe(layers(), 4, schedule=schedule, loss_fn=functional.cross_entropy, **workers)
        self.inside = schedule != "gpipe"
        self.everywhere = {"outputs": "all"} if "mesh" in workers else {}
        self.modules = {"before": self.before, "between": self.between, "first": self.first, "second": self.second}

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        value = self.between(self.first(self.before(x).relu(), **self.everywhere)).relu()
        if self.inside:
            return self.second(value, target=y)
        return functional.cross_entropy(self.second(value, **self.everywhere), y)

    def parameters(self) -> dict[str, nn.Parameter]:
        return {f"{place}.{name}": p for place, module in self.modules.items() for name, p in module.named_parameters()}


def chain(mesh: Mesh, schedule: str) -> None:
    threads = Net({"devices": ["cpu"] * len(mesh.ranks)}, schedule)
    ranks = Net({"mesh": mesh}, schedule)
    optimizers = [torch.optim.AdamW(net.parameters().values(), lr=0.01) for net in (ranks, threads)]
    for step, rows in enumerate((8, 8, 5, 2)):
        x, y = torch.randn(rows, 4), torch.randint(3, (rows,))
        losses = []
        for net in (ranks, threads):
            torch.manual_seed(step)
            losses.append(net.loss(x, y))
            (losses[-1] * 0.3 if step else losses[-1]).backward(retain_graph=step == 2)
            if step == 2:
                losses[-1].backward()
        assert torch.equal(*losses)
        expected = threads.parameters()
        for name, parameter in ranks.parameters().items():
            assert torch.equal(parameter.grad, expected[name].grad), (step, name)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    expected = threads.parameters()
    for name, parameter in ranks.parameters().items():
        assert torch.equal(parameter, expected[name]), name


@pytest.mark.parametrize(("ranks", "schedule"), [(2, "1f1b"), (3, "gpipe"), (3, "interleaved-1f1b"), (2, "zb-v")])
def test_modules_and_pipes_before_a_pipe_train_as_in_one_process(on_ranks: Run, ranks: int, schedule: str) -> None:
    on_ranks(ranks, chain, schedule=schedule)


class Both:
    """A pipe of this mesh and one of threads, with the same input in parts that require a gradient."""

    def __init__(self, mesh: Mesh, schedule: str = "1f1b", **options: Any) -> None:
        options = {"schedule": schedule, "loss_fn": functional.cross_entropy, **options}
        module = layers(first=4)
        self.threads = Pipe(copy.deepcopy(module), 4, devices=["cpu"] * len(mesh.ranks), **options)
        self.pipe = Pipe(module, 4, mesh=mesh, **options)
        self.mine, self.theirs = (torch.ones(8, 4).cumsum(0).sin().requires_grad_() for _ in range(2))
        self.y = torch.arange(8) % 3

    def losses(self, *given: Any) -> tuple[Tensor, Tensor]:
        """Of the pipe of processes, from another input if there is one, and of that of threads."""
        torch.manual_seed(1)
        loss = self.pipe(*(given or (self.mine,)), target=self.y)
        torch.manual_seed(1)
        return loss, self.threads(self.theirs, target=self.y)


def some_want_gradients(mesh: Mesh) -> None:
    """Who reads nothing may leave the input out, or detach it."""
    both = Both(mesh)
    for others in (None, both.mine.detach(), both.mine):
        both.mine.grad = both.theirs.grad = None
        loss, expected = both.losses(both.mine if both.pipe.is_first else others)
        (loss * 3.0).backward()
        (expected * 3.0).backward()
        assert (both.mine.grad is None) == (others is not both.mine and not both.pipe.is_first)
        if both.mine.grad is not None:
            assert torch.equal(both.mine.grad, both.theirs.grad)


def one_asks_alone(mesh: Mesh) -> None:
    """With the loss inside the gradient is there: a rank gets it without the others."""
    both = Both(mesh)
    for mode in (True, False):
        both.pipe.train(mode)
        both.threads.train(mode)
        loss, expected = both.losses()
        if not both.pipe.is_first:
            assert torch.equal(
                *(torch.autograd.grad(*each)[0] for each in ((loss, both.mine), (expected, both.theirs)))
            )
    with torch.no_grad():
        assert not both.losses()[0].requires_grad


def given_micro_batches(mesh: Mesh) -> None:
    """One tensor is in two of them."""
    both = Both(mesh, loss_weight=torch.numel)
    pairs = [[each[:3], each[3:], each] for each in (both.mine, both.theirs)]
    losses = []
    for pipe, parts in zip((both.pipe, both.threads), pairs, strict=True):
        torch.manual_seed(1)
        targets = MicroBatches([both.y[:3], both.y[3:], both.y])
        losses.append(pipe(MicroBatches(parts), target=targets))
        losses[-1].backward()
    assert torch.equal(*losses)
    assert torch.equal(both.mine.grad, both.theirs.grad)


class Adds(nn.Module):
    def forward(self, x: Tensor, *, shift: Tensor) -> Tensor:
        return x + shift


def by_name(mesh: Mesh) -> None:
    module = nn.Sequential(Adds(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3))
    grads = []
    for workers in ({"mesh": mesh}, {"devices": ["cpu"] * len(mesh.ranks)}):
        pipe = Pipe(copy.deepcopy(module), 2, schedule="1f1b", loss_fn=functional.cross_entropy, **workers)
        shift = torch.ones(6, 4, requires_grad=True)
        pipe(torch.ones(6, 4), shift=shift, target=torch.arange(6) % 3).backward()
        grads.append(shift.grad)
    assert torch.equal(*grads)


def without_gradients(mesh: Mesh) -> None:
    """Nothing is sent for inputs that need none."""
    both = Both(mesh)
    del RankTransport._share_input_gradients
    both.losses(both.mine.detach())[0].backward()
    with torch.no_grad():
        both.losses()


BODIES = [some_want_gradients, one_asks_alone, given_micro_batches, by_name, without_gradients]


def every_body(mesh: Mesh) -> None:
    for body in BODIES:
        torch.manual_seed(0)
        body(mesh)


@pytest.mark.parametrize("ranks", [2, 3])
def test_who_wants_the_gradient_of_an_input_gets_it(on_ranks: Run, ranks: int) -> None:
    on_ranks(ranks, every_body)


def of_replicas(mesh: Mesh) -> None:
    both = Both(mesh)
    with torch.no_grad():
        for each in (both.mine, both.theirs):
            each += both.pipe.data_parallel_rank
    loss, expected = both.losses()
    loss.backward()
    expected.backward()
    assert torch.equal(both.mine.grad, both.theirs.grad)


def test_each_replica_gets_the_gradients_of_its_own_inputs(on_ranks: Run) -> None:
    on_ranks(4, of_replicas, init={"dp": 2})


def first_detaches(mesh: Mesh, other: str) -> str:
    both = Both(mesh)
    inputs = {"detached": both.mine.detach(), "shorter": both.mine[:7], "others": both.mine * 2}
    with pytest.raises((ValueError, PipelineError)) as error:
        both.pipe(inputs[other] if both.pipe.is_first else both.mine, target=both.y[: len(inputs[other])])
    return str(error.value)


@pytest.mark.parametrize("other", ["detached", "shorter", "others"])
def test_a_gradient_that_the_first_rank_does_not_compute_is_refused(start: Callable[..., Any], other: str) -> None:
    # Of a shorter batch both may be seen first: that it is another, and that its gradient is.
    words = {"detached": "an input requires a gradient on rank ", "others": "was given other inputs than rank "}
    for ended in start(3, first_detaches, other=other).ended():
        assert any(each in ended.result for name, each in words.items() if other in (name, "shorter")), ended.errors


def chained_on_one(mesh: Mesh) -> str:
    """One rank alone goes back into the first pipe."""
    net = Net({"mesh": mesh}, "1f1b")
    try:
        for _ in range(3):
            value = net.first(net.before(torch.ones(8, 4)), outputs="all")
            value = net.between(value if net.first.is_first else value.detach())
            net.second(value, target=torch.arange(8) % 3).backward()
    except PipelineError as error:
        return error.kind
    return ""


def test_a_pipe_that_only_some_go_back_into_is_noticed(start: Callable[..., Any]) -> None:
    for ended in start(2, chained_on_one).ended():
        assert ended.result in ("disagreement", "left"), ended.errors
