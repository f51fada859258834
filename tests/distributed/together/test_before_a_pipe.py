"""What comes before a pipe of processes, also another pipe: all ranks get the gradients of its inputs."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from pipework import Mesh, MicroBatches, Pipe, PipelineError
from pipework.distributed.transport.rank_transport import RankTransport
from tests.distributed.together.alike import both, other_gradients, refused
from tests.jobs import runs_on


def layers(first: int = 6, last: int = 3) -> nn.Sequential:
    hidden = [layer for _ in range(2) for layer in (nn.Linear(8, 8), nn.Tanh(), nn.Dropout(0.2))]
    return nn.Sequential(nn.Linear(first, 8), *hidden, nn.Linear(8, last))


class Net(nn.Module):
    """A module, a pipe, another module and a second pipe, one after the other.

    Args:
        workers: arguments of the pipes.
        schedule: of the second pipe; its loss is inside unless this is "gpipe".
    """

    def __init__(self, workers: dict[str, Any], schedule: str) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.before, self.between = nn.Linear(4, 6), nn.Linear(5, 6)
        self.first = Pipe(layers(last=5), 4, **workers)
        self.second = Pipe(layers(), 4, schedule=schedule, loss_fn=functional.cross_entropy, **workers)
        self.inside = schedule != "gpipe"
        self.everywhere = {"outputs": "all"} if "mesh" in workers else {}

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        value = self.between(self.first(self.before(x).relu(), **self.everywhere)).relu()
        if self.inside:
            return self.second(value, target=y)
        return functional.cross_entropy(self.second(value, **self.everywhere), y)


@pytest.mark.parametrize(("ranks", "schedule"), [(2, "1f1b"), (3, "gpipe"), (3, "interleaved-1f1b"), (2, "zb-v")])
@runs_on()
def test_modules_and_pipes_before_a_pipe_train_as_in_one_process(mesh: Mesh, schedule: str) -> None:
    nets = ranks, threads = [Net({"mesh": mesh}, schedule), Net({"devices": ["cpu"] * len(mesh.ranks)}, schedule)]
    optimizers = [torch.optim.AdamW(net.parameters(), lr=0.01) for net in nets]
    for step, rows in enumerate((8, 8, 5, 2)):
        x, y = torch.randn(rows, 4), torch.randint(3, (rows,))
        losses = []
        for net in nets:
            torch.manual_seed(step)
            losses.append(net.loss(x, y))
            (losses[-1] * 0.3 if step else losses[-1]).backward(retain_graph=step == 2)
            if step == 2:
                losses[-1].backward()
        assert torch.equal(*losses)
        assert other_gradients(ranks, threads) == []
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for name, parameter in ranks.named_parameters():
        assert torch.equal(parameter, threads.get_parameter(name)), name


class Both:
    """A pipe of this mesh and one of threads, with the same input in parts that require a gradient."""

    def __init__(self, mesh: Mesh, **options: Any) -> None:
        options = {"schedule": "1f1b", "loss_fn": functional.cross_entropy, **options}
        self.pipe, self.threads = both(layers(first=4), mesh, **options)
        self.mine, self.theirs = (torch.ones(8, 4).cumsum(0).sin().requires_grad_() for _ in range(2))
        self.y = torch.arange(8) % 3

    def losses(self, *given: Any) -> tuple[Tensor, Tensor]:
        """Of the pipe of processes, from another input if there is one, and of that of threads."""
        torch.manual_seed(1)
        loss = self.pipe(*(given or (self.mine,)), target=self.y)
        torch.manual_seed(1)
        return loss, self.threads(self.theirs, target=self.y)


of_two_or_three = pytest.mark.parametrize("ranks", [2, 3])


@of_two_or_three
@runs_on()
def test_who_reads_no_input_may_leave_it_out_or_detach_it(mesh: Mesh) -> None:
    pair = Both(mesh)
    for others in (None, pair.mine.detach(), pair.mine):
        pair.mine.grad = pair.theirs.grad = None
        loss, expected = pair.losses(pair.mine if pair.pipe.is_first else others)
        (loss * 3.0).backward()
        (expected * 3.0).backward()
        assert (pair.mine.grad is None) == (others is not pair.mine and not pair.pipe.is_first)
        if pair.mine.grad is not None:
            assert torch.equal(pair.mine.grad, pair.theirs.grad)


@of_two_or_three
@runs_on()
def test_one_rank_alone_may_ask_for_the_gradient_of_an_input(mesh: Mesh) -> None:
    """With the loss inside the gradient is there: a rank gets it without the others."""
    pair = Both(mesh)
    for mode in (True, False):
        pair.pipe.train(mode)
        pair.threads.train(mode)
        loss, expected = pair.losses()
        if not pair.pipe.is_first:
            assert torch.equal(
                *(torch.autograd.grad(*each)[0] for each in ((loss, pair.mine), (expected, pair.theirs)))
            )
    with torch.no_grad():
        assert not pair.losses()[0].requires_grad


@of_two_or_three
@runs_on()
def test_gradients_of_given_micro_batches(mesh: Mesh) -> None:
    """One tensor is in two of them."""
    pair = Both(mesh, loss_weight=torch.numel)
    pairs = [[each[:3], each[3:], each] for each in (pair.mine, pair.theirs)]
    losses = []
    for pipe, parts in zip((pair.pipe, pair.threads), pairs, strict=True):
        torch.manual_seed(1)
        targets = MicroBatches([pair.y[:3], pair.y[3:], pair.y])
        losses.append(pipe(MicroBatches(parts), target=targets))
        losses[-1].backward()
    assert torch.equal(*losses)
    assert torch.equal(pair.mine.grad, pair.theirs.grad)


class Adds(nn.Module):
    def forward(self, x: Tensor, *, shift: Tensor) -> Tensor:
        return x + shift


@of_two_or_three
@runs_on()
def test_the_gradient_of_an_input_with_a_name(mesh: Mesh) -> None:
    grads = []
    for pipe in both(nn.Sequential(Adds(), nn.Linear(4, 4), nn.Linear(4, 3)), mesh, loss_fn=functional.cross_entropy):
        shift = torch.ones(6, 4, requires_grad=True)
        pipe(torch.ones(6, 4), shift=shift, target=torch.arange(6) % 3).backward()
        grads.append(shift.grad)
    assert torch.equal(*grads)


@runs_on(2)
def test_nothing_is_sent_for_inputs_that_need_no_gradient(mesh: Mesh, monkeypatch: pytest.MonkeyPatch) -> None:
    pair = Both(mesh)
    monkeypatch.delattr(RankTransport, "_share_input_gradients")
    pair.losses(pair.mine.detach())[0].backward()
    with torch.no_grad():
        pair.losses()


@runs_on(4, dp=2)
def test_each_replica_gets_the_gradients_of_its_own_inputs(mesh: Mesh) -> None:
    pair = Both(mesh)
    with torch.no_grad():
        for each in (pair.mine, pair.theirs):
            each += pair.pipe.data_parallel_rank
    loss, expected = pair.losses()
    loss.backward()
    expected.backward()
    assert torch.equal(pair.mine.grad, pair.theirs.grad)


@pytest.mark.parametrize("other", ["detached", "shorter", "others"])
@runs_on(3)
def test_a_gradient_that_the_first_rank_does_not_compute_is_refused(mesh: Mesh, other: str) -> None:
    pair = Both(mesh)
    inputs = {"detached": pair.mine.detach(), "shorter": pair.mine[:7], "others": pair.mine * 2}
    words = {"detached": "an input requires a gradient on rank ", "others": "was given other inputs than rank "}
    # Of a shorter batch both may be seen first: that it is another, and that its gradient is.
    with refused(words.get(other, "|".join(words.values()))):
        pair.pipe(inputs[other] if pair.pipe.is_first else pair.mine, target=pair.y[: len(inputs[other])])


@runs_on(2)
def test_a_pipe_that_only_some_go_back_into_is_noticed(mesh: Mesh) -> None:
    net = Net({"mesh": mesh}, "1f1b")
    with refused(None, PipelineError) as caught:
        for _ in range(3):
            value = net.first(net.before(torch.ones(8, 4)), outputs="all")
            value = net.between(value if net.first.is_first else value.detach())
            net.second(value, target=torch.arange(8) % 3).backward()
    assert caught.value.kind in ("disagreement", "left")
