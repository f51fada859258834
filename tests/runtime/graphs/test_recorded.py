"""The stand-in for graphs itself: a step replayed with new data is the eager one, and a capture takes no effect."""

from __future__ import annotations

import contextlib
import copy
from typing import TYPE_CHECKING

import pytest
import torch
from torch import Tensor, nn

from tests.runtime.graphs.recorded import RecordedGraphs, _drawing_from

if TYPE_CHECKING:
    from collections.abc import Callable

NOT_PERMITTED = "operation not permitted when stream is capturing"


class Block(nn.Module):
    """Views, operators in place, running statistics, results that are no contiguous tensors, and integers."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 6)
        self.norm = nn.BatchNorm1d(6)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls.add_(1)
        values = self.norm(self.linear(x))
        values[:, ::2].mul_(2.0)
        best = values.argmax(dim=1, keepdim=True)
        values = values.view(-1, 3, 2).transpose(1, 2).relu_()
        return values.flatten(1) + values.flatten(1).gather(1, best).expand(-1, 6)


def step(model: nn.Module, x: Tensor, target: Tensor) -> Tensor:
    loss = nn.functional.mse_loss(nn.functional.dropout(model(x), 0.3), target)
    loss.backward()
    return loss.detach()


def test_replays_with_new_data_are_eager_steps() -> None:
    model = Block()
    eager = copy.deepcopy(model)
    x, target = torch.zeros(8, 4), torch.zeros(8, 6)
    graphs = RecordedGraphs()
    graph, state, unused = graphs.graph(), graphs.state(), graphs.state()
    for each in model.parameters():
        each.grad = torch.zeros_like(each)
    with graph.capture([state, unused]):
        unused.use()
        state.use()
        with torch.autograd.set_multithreading_enabled(False):
            loss = step(model, x, target)
    for number in range(3):
        x.normal_(), target.normal_()
        state.seed(number), unused.seed(number)
        graph.replay()
        assert state.drew
        assert not unused.drew
        own = graphs.state()
        own.seed(number)
        with _drawing_from(own):
            assert torch.equal(step(eager, x, target), loss)  # and the gradients are accumulated
        for mine, its in zip(model.parameters(), eager.parameters(), strict=True):
            assert torch.equal(mine.grad, its.grad)
        for mine, its in zip(model.buffers(), eager.buffers(), strict=True):
            assert torch.equal(mine, its)
        with torch.no_grad():
            for mine, its in zip(model.parameters(), eager.parameters(), strict=True):
                mine.sub_(0.1 * mine.grad), its.sub_(0.1 * its.grad)


def test_a_capture_takes_no_effect() -> None:
    model, x = Block(), torch.randn(8, 4)
    graphs = RecordedGraphs()
    graph, state = graphs.graph(), graphs.state()
    x_before, before = x.clone(), copy.deepcopy(model.state_dict())
    default = torch.get_rng_state()
    with graph.capture([state]):
        draws = torch.rand(2)
        state.use()
        x.add_(1.0)
        loss = step(model, x, torch.zeros(8, 6))
        best = x.argmax(dim=1)
    assert loss.isnan()
    assert draws.isnan().all()
    assert all(each.grad.isnan().all() for each in model.parameters())
    assert (best < 4).all()  # integers stay: they may be indices
    assert torch.equal(x, x_before)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), default)
    assert not state.drew


def test_graphs_that_follow_one_another_pass_values_on() -> None:
    graphs, x = RecordedGraphs(), torch.zeros(3)
    first, second = graphs.graph(), graphs.graph()
    with first.capture():
        y = graphs.unowned(x * 2)
    first.replay()
    with second.capture():
        y.add_(1.0)
        z = y.view(3, 1).expand(3, 2)
    assert y.tolist() == [0.0] * 3
    x.fill_(4.0)
    first.replay(), second.replay()
    assert y.tolist() == [9.0] * 3
    assert z.tolist() == [[9.0, 9.0]] * 3
    assert z.stride() == (1, 0)


def test_a_state_goes_on_where_it_is() -> None:
    graphs = RecordedGraphs()
    graph, state = graphs.graph(), graphs.state()
    with graph.capture([state]):
        state.use()
        drawn = torch.rand(4)
    state.seed(7)
    graph.replay()
    first = drawn.clone()
    graph.replay()
    assert torch.equal(torch.cat((first, drawn)), torch.rand(8, generator=torch.Generator().manual_seed(7)))


def test_a_replay_never_draws_from_the_stream_of_the_worker() -> None:
    graphs = RecordedGraphs()
    graph, state, of_worker = graphs.graph(), graphs.state(), graphs.state()
    with graph.capture([state]):
        from_default = torch.rand(4)
        state.use()
        from_state = torch.rand(4)
    state.seed(3)
    torch.manual_seed(4)
    with _drawing_from(of_worker):
        graph.replay()
    assert torch.equal(from_state, torch.rand(4, generator=torch.Generator().manual_seed(3)))
    assert torch.equal(from_default, torch.rand(4, generator=torch.Generator().manual_seed(4)))
    assert not of_worker.drew


def test_a_replay_counts_no_changes_in_place() -> None:
    graphs, x, weight = RecordedGraphs(), torch.ones(2), torch.ones(2, requires_grad=True)
    graph = graphs.graph()
    with graph.capture():
        y = x * 2
        y.add_(1.0)
    graph.replay()
    product = weight * y  # autograd saves y
    graph.replay()
    product.sum().backward()
    assert weight.grad is not None
    assert weight.grad.tolist() == [3.0, 3.0]


def test_a_replay_is_below_autocast() -> None:
    graphs, x = RecordedGraphs(), torch.randn(4, 4)
    graph = graphs.graph()
    with graph.capture():
        y = x @ x
    with torch.autocast("cpu", torch.bfloat16):
        graph.replay()
    assert torch.equal(y, x @ x)


REFUSED: dict[str, Callable[[Tensor], object]] = {
    "item": lambda x: x.sum().item(),
    "if": lambda x: bool(x.any()),
    "equal": lambda x: torch.equal(x, x),
    "nonzero": lambda x: x.nonzero(),
    "where": lambda x: torch.where(x > 0),
    "masked_select": lambda x: x.masked_select(x > 0),
    "a mask": lambda x: x[x > 0],
    "assigned to a mask": lambda x: x.clone().index_put_((x > 0,), x[:1].expand(3)),
    "unique": lambda x: x.unique(),
    "repeats": lambda x: x.repeat_interleave(torch.tensor([1, 2, 3])),
    "a generator": lambda x: torch.rand(3, generator=torch.Generator()),
    "sparse": lambda x: x.to_sparse(),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_a_capture_refuses(what: str) -> None:
    graphs, x = RecordedGraphs(), torch.tensor([1.0, 2.0, 3.0])
    graph = graphs.graph()

    def captured() -> None:
        with graph.capture():
            x.zero_()
            REFUSED[what](x)

    with pytest.raises(RuntimeError, match=NOT_PERMITTED):
        captured()
    assert x.tolist() == [1.0, 2.0, 3.0]
    with pytest.raises(RuntimeError, match="without a successful capture"):
        graph.replay()
    with graphs.graph().capture():  # nothing is left under way
        x[x > 0] = 0.0  # and this needs no count


def test_an_error_that_a_layer_catches_ends_the_capture_all_the_same() -> None:
    def captured() -> None:
        with RecordedGraphs().graph().capture(), contextlib.suppress(RuntimeError):
            torch.ones(2).sum().item()

    with pytest.raises(RuntimeError, match="previous error during capture"):
        captured()


def test_the_error_of_a_layer_is_raised() -> None:
    x = torch.ones(2)

    def captured() -> None:
        with RecordedGraphs().graph().capture():
            x.zero_()
            raise KeyError

    with pytest.raises(KeyError):
        captured()
    assert x.tolist() == [1.0, 1.0]


def test_states_in_wrong_places() -> None:
    graphs = RecordedGraphs()
    graph, state = graphs.graph(), graphs.state()
    with pytest.raises(RuntimeError, match="outside of a capture"):
        state.use()
    with graph.capture([state]):
        with pytest.raises(RuntimeError, match="outside of a capture that was given it"):
            graphs.state().use()
        state.use()
        state.use()
        torch.rand(1)
        with pytest.raises(RuntimeError, match="does not start again"):
            state.use()
