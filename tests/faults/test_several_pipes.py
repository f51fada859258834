"""Row 24 of the fault matrix: several pipes in one process, called in turns, from threads, and one inside another."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from pipework import Pipe
from tests.helpers import in_threads

pytestmark = pytest.mark.timeout(60)


def module() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.3), nn.Tanh(), nn.Linear(4, 4))


def piped(plain: nn.Sequential, checkpoint: str = "except_last", chunks: int = 3) -> Pipe:
    return Pipe(copy.deepcopy(plain), chunks, checkpoint, balance=[1, 3], devices=["cpu"] * 2)


def gradients(pipe: Pipe, x: Tensor, seed: int) -> tuple[Tensor, ...]:
    torch.manual_seed(seed)
    return torch.autograd.grad(pipe(x).square().sum(), list(pipe.parameters()))


def all_equal(left: tuple[Tensor, ...], right: tuple[Tensor, ...]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


def test_one_graph_through_two_pipes_and_what_lies_between() -> None:
    first, second = module().double(), module().double()
    first[1] = second[1] = nn.Identity()
    pipes = [piped(first, "always"), piped(second, "never")]
    x = torch.randn(6, 4, dtype=torch.float64, requires_grad=True)
    expected = torch.autograd.grad(
        second(first(x).exp()).square().sum(), [x, *first.parameters(), *second.parameters()]
    )
    output = pipes[1](pipes[0](x).exp())
    actual = torch.autograd.grad(output.square().sum(), [x, *pipes[0].parameters(), *pipes[1].parameters()])
    for mine, theirs in zip(actual, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-14)


def test_forward_and_backward_on_threads_of_threads(checkpoint: str) -> None:
    """Made on one thread, run forward on another, and backward on a third that the second has started."""
    plain, x = module(), torch.randn(6, 4)
    expected = gradients(piped(plain, checkpoint), x, seed=1)
    found: dict[str, object] = {}

    def make() -> None:
        found["pipe"] = piped(plain, checkpoint)

    def backward() -> None:
        found["loss"].backward()

    def forward() -> None:
        torch.manual_seed(1)
        found["loss"] = found["pipe"](x).square().sum()
        in_threads(backward)

    in_threads(make)
    in_threads(forward)
    assert all_equal(tuple(parameter.grad for parameter in found["pipe"].parameters()), expected)
    assert all_equal(gradients(found["pipe"], x, seed=1), expected)


class Calls(nn.Module):
    """Calls what it holds, which is no child of it."""

    def __init__(self, called: Callable[[Tensor], Tensor] | None = None) -> None:
        super().__init__()
        self.called = [called]

    def forward(self, x: Tensor) -> Tensor:
        return self.called[0](x)


@pytest.mark.parametrize(("inner", "outer"), [("never", "always"), ("always", "never"), ("except_last", "always")])
def test_a_layer_may_evaluate_another_pipe(inner: str, outer: str) -> None:
    """A frozen one, as for features: its threads are called from a worker of the first."""
    features = module().eval()
    frozen = piped(features, inner).requires_grad_(False).eval()
    plain = nn.Sequential(nn.Linear(4, 4), Calls(features.requires_grad_(False)), nn.Linear(4, 4)).double()
    features.double()
    frozen.double()
    copies = nn.Sequential(copy.deepcopy(plain[0]), Calls(frozen), copy.deepcopy(plain[2]))
    pipe = Pipe(copies, 2, outer, balance=[1, 2], devices=["cpu"] * 2)
    x = torch.randn(6, 4, dtype=torch.float64)
    expected = torch.autograd.grad(plain(x).square().sum(), list(plain.parameters()))
    for mine, theirs in zip(gradients(pipe, x, seed=0), expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-14)
