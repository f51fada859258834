"""Gradients that other pipelines got wrong or refused: of values beside others that have none, some only, or twice."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipework import PipeSequential
from pipework.testing import draw_key
from tests.conftest import WAYS
from tests.ranks import held

CHECKPOINT_MODES = ("never", "except_last", "always")
WIDTH = 6


# 11


class Positions(nn.Module):
    """Its first output is a float tensor that needs no gradient, its second one does, its third is no float."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return x.detach().sin(), self.linear(x), x > 0


class Combine(nn.Module):
    def __init__(self, seen: list[tuple[bool, ...]]) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.seen = seen

    def forward(self, *values: Tensor) -> Tensor:
        self.seen.append(tuple(value.requires_grad for value in values))
        positions, x, mask = values
        return torch.where(mask, self.linear(x) * positions, x.square())


@pytest.mark.parametrize("balance", [[3], [1, 2], [1, 1, 1]], ids=str)
@pytest.mark.parametrize("checkpoint", CHECKPOINT_MODES)
def test_11_a_value_without_gradient_before_one_that_has_one(
    checkpoint: str, balance: list[int], assert_trained_alike: Callable[..., None]
) -> None:
    """Checkpointing made every float tensor at a boundary require a gradient, and then counted the gradients that came
    back from the front: those of the tensor before stood for those of the next, without an error.
    """
    seen: list[tuple[bool, ...]] = []
    plain = PipeSequential(Positions(), Combine(seen), nn.Linear(WIDTH, 2))
    pipe = WAYS["outside"].pipe(plain, 3, checkpoint, balance=balance)
    for layer in pipe:
        if isinstance(layer, Combine):
            layer.seen = seen
    assert_trained_alike(plain, pipe, [(torch.randn(7, WIDTH),) for _ in range(3)])
    assert set(seen) == {(False, True, False)}


# 20


def model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.3), nn.Tanh(), nn.Linear(WIDTH, 3))


class Both:
    """The gradients of one mini-batch: those of the un-pipelined model are there, the pipe's are to be computed."""

    def __init__(self, way: Any, checkpoint: str, balance: list[int]) -> None:
        plain = model()
        self.pipe = way.pipe(plain, 4, checkpoint, balance=balance)
        self.x, target = torch.randn(8, WIDTH, requires_grad=True), torch.randn(8)
        torch.manual_seed(1)
        way.reference(plain, self.x, target, 4, draw_key())
        self.wanted = [*self.pipe.parameters(), self.x]
        self.expected = [*(parameter.grad for parameter in held(plain, self.pipe).parameters()), self.x.grad]
        self.x.grad = None
        torch.manual_seed(1)
        self.loss = way.loss(self.pipe, self.x, target)


@pytest.fixture(params=CHECKPOINT_MODES)
def checkpoint(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(params=[[4], [1, 3], [1, 1, 1, 1]], ids=str)
def both(way: Any, checkpoint: str, request: pytest.FixtureRequest) -> Both:
    return Both(way, checkpoint, request.param)


def test_20_autograd_grad(both: Both) -> None:
    """Checkpointed partitions knew `backward()` only: reentrant autograd refuses to be asked for some gradients."""
    assert all(map(torch.equal, torch.autograd.grad(both.loss, both.wanted), both.expected))
    assert all(tensor.grad is None for tensor in both.wanted)


@pytest.mark.one_process("a rank can ask for the gradients of what it holds, and all must ask")
def test_20_some_gradients_at_a_time(both: Both) -> None:
    """The same, where the caller asks for one gradient after the other over a retained graph, in any order."""
    for number in (1, 0, len(both.wanted) - 1, 2, 1):
        (gradient,) = torch.autograd.grad(both.loss, [both.wanted[number]], retain_graph=True)
        assert torch.equal(gradient, both.expected[number])
    both.loss.backward()
    assert all(torch.equal(tensor.grad, gradient) for tensor, gradient in zip(both.wanted, both.expected, strict=True))


def test_20_retained_graphs(both: Both) -> None:
    """What a recomputation had made was thrown away after its first use, and a second backward failed inside of it.

    Without `retain_graph`, a second backward is PyTorch's own error.
    """
    both.loss.backward(retain_graph=True)
    both.loss.backward()
    for tensor, gradient in zip(both.wanted, both.expected, strict=True):
        assert torch.equal(tensor.grad, gradient + gradient)
    with pytest.raises(RuntimeError, match="Trying to backward through the graph a second time"):
        both.loss.backward()


def test_20_hooks_fire_once_with_the_whole_gradient(both: Both) -> None:
    """Replicas' reducers count on one firing for each parameter; with checkpointing there was one per micro-batch.

    The replicas themselves, in every checkpoint mode, are in tests/ddp.
    """
    fired: list[tuple[int, Tensor]] = []
    for number, parameter in enumerate(both.pipe.parameters()):
        parameter.register_hook(lambda gradient, n=number: fired.append((n, gradient.clone())))
        parameter.register_post_accumulate_grad_hook(lambda p, n=number: fired.append((n, p.grad.clone())))
    both.loss.backward()
    assert sorted(number for number, _ in fired) == sorted([*range(len(list(both.pipe.parameters())))] * 2)
    assert all(torch.equal(gradient, both.expected[number]) for number, gradient in fired)
