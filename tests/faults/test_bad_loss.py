"""Targets, losses and calls that do not fit: a clear error before or at the first action, and the pipe goes on."""

import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pipework import Pipe
from pipework.schedule import one_forward_one_backward

ROWS = 6


@pytest.fixture(params=["gpipe", "1f1b", "interleaved-1f1b", "looped-bfs", "own"])
def make(request: pytest.FixtureRequest) -> Callable[..., Pipe]:
    """Makes a pipe of four stages."""
    workers = 2 if request.param in ("interleaved-1f1b", "looped-bfs") else 4
    schedule = one_forward_one_backward(4, 3) if request.param == "own" else request.param

    def pipe(loss_fn: Any = F.mse_loss, **options: Any) -> Pipe:
        module = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
        devices = ["cpu"] * workers
        return Pipe(module, 3, balance=[1] * 4, devices=devices, schedule=schedule, loss_fn=loss_fn, **options)

    return pipe


@pytest.fixture
def pipe(make: Callable[..., Pipe]) -> Iterator[Pipe]:
    """One that is used again when the test is over."""
    made = make()
    yield made
    made.zero_grad()
    made(torch.randn(ROWS, 4), target=torch.randn(ROWS, 4)).backward()
    assert all(parameter.grad is not None for parameter in made.parameters())


@pytest.mark.parametrize(
    ("target", "message"),
    [
        (torch.zeros(ROWS - 1, 4), r"inputs have 6 rows and a target tensor has shape \(5, 4\)"),
        (torch.zeros(ROWS + 1, 4), r"inputs have 6 rows and a target tensor has shape \(7, 4\)"),
        (torch.zeros(0, 4), r"inputs have 6 rows and a target tensor has shape \(0, 4\)"),
        (torch.tensor(1.0), r"shape \(\): wanted as many rows, .*Wrap .* in NoChunk"),
        (torch.zeros(ROWS, 4, requires_grad=True), "requires a gradient, which it would not get"),
        ({"a": torch.zeros(ROWS, 4), "b": [torch.zeros(2)]}, r"shape \(2,\)"),
        (torch.zeros(ROWS, 4, device="meta"), "meta"),
    ],
)
def test_a_target_that_does_not_fit(pipe: Pipe, target: Any, message: str) -> None:
    state = torch.get_rng_state()
    with pytest.raises((ValueError, NotImplementedError), match=message):
        pipe(torch.randn(ROWS, 4, generator=torch.Generator()), target=target)
    assert message == "meta" or torch.equal(torch.get_rng_state(), state), "nothing has been drawn"


def test_a_missing_target_says_what_to_call() -> None:
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    x = torch.randn(ROWS, 4)
    pipe = Pipe(module, 3, balance=[1, 1], devices=["cpu"] * 2, schedule="1f1b", loss_fn=F.mse_loss)
    without = Pipe(module, 3, balance=[1, 1], devices=["cpu"] * 2, schedule="1f1b")
    for call, wanted in (
        (lambda: pipe(x), r"call pipe\(x, target=y\)"),
        (lambda: pipe.predict(input=x), r"call pipe\.predict\(x, target=y\)"),
        (lambda: without(x), r"give Pipe a loss_fn and call pipe\(x, target=y\)"),
        (lambda: without.predict(x, timeout=0), r"give Pipe a loss_fn and call pipe\.predict\(x, target=y\)"),
    ):
        begin = "^schedule '1f1b' computes the loss inside and got no target: "
        with pytest.raises(ValueError, match=begin + wanted + r"\. For outputs alone use"):
            call()
    with pytest.raises(ValueError, match="got no target, but labels=, which is an input by that name: call pipe"):
        pipe(x, labels=x)


@pytest.mark.parametrize(
    ("result", "error", "message"),
    [
        (lambda loss: None, TypeError, r"loss_fn \(odd\) returned NoneType, wanted the loss"),
        (lambda loss: float(loss.detach().sum()), TypeError, r"loss_fn \(odd\) returned float"),
        (lambda loss: loss, ValueError, r"loss_fn \(odd\) returned a tensor of shape \(2, 4\)"),
        (lambda loss: loss.mean()[None], ValueError, r"returned a tensor of shape \(1,\), wanted a 0-dimensional loss"),
    ],
)
@pytest.mark.parametrize("grad", [True, False])
def test_a_result_that_is_no_loss(
    make: Callable[..., Pipe], result: Any, error: type, message: str, grad: bool
) -> None:
    def odd(output: Tensor, target: Tensor) -> Any:
        return result(F.mse_loss(output, target, reduction="none"))

    pipe = make(odd)
    for _ in range(2):
        with torch.set_grad_enabled(grad), pytest.raises(error, match=message) as caught:
            pipe(torch.randn(ROWS, 4), target=torch.randn(ROWS, 4))
        assert caught.value.__notes__ == ["pipework: stage 3, micro-batch 0, action F"]
    assert all(isinstance(parameter, nn.Parameter) for parameter in pipe.parameters())


def test_a_last_layer_that_takes_no_target(make: Callable[..., Pipe]) -> None:
    pipe = make(None)
    with pytest.raises(TypeError, match="positional argument") as caught:
        pipe(torch.randn(ROWS, 4), target=torch.randn(ROWS, 4))
    assert "pipework: in layer '3' (Linear)" in caught.value.__notes__
    assert any(note.endswith("returns the loss; or give Pipe a loss_fn") for note in caught.value.__notes__)


def test_a_last_layer_that_returns_no_loss(make: Callable[..., Pipe]) -> None:
    class Subtract(nn.Module):
        def forward(self, x: Tensor, target: Tensor) -> Tensor:
            return x - target

    pipe = make(None)
    setattr(pipe, "3", Subtract())
    with pytest.raises(ValueError, match=r"the last layer returned a tensor of shape \(2, 4\)"):
        pipe(torch.randn(ROWS, 4), target=torch.randn(ROWS, 4))


@pytest.mark.parametrize(
    ("weight", "what"),
    [
        (torch.zeros(2, 4), r"a tensor of shape \(2, 4\)"),
        (None, "NoneType"),
        ("many", "str"),
        (-1.0, "-1.0"),
        (float("nan"), "nan"),
        (float("inf"), "inf"),
        (torch.tensor(-0.5), "-0.5"),
        (ZeroDivisionError(), ""),
    ],
)
def test_a_weight_that_is_no_number_of_at_least_0(make: Callable[..., Pipe], weight: Any, what: str) -> None:
    def weight_of(target: Tensor) -> Any:
        if isinstance(weight, Exception):  # the caller's own error
            raise weight
        return weight

    pipe = make(loss_weight=weight_of)
    message = f"loss_weight gave {what} for micro-batch 0: wanted a finite number of at least 0" if what else ""
    x, state = torch.randn(ROWS, 4), torch.get_rng_state()
    with pytest.raises((TypeError, ValueError, ZeroDivisionError)) as caught:
        pipe(x, target=x)
    assert caught.value is weight or re.search(message, str(caught.value))
    assert torch.equal(torch.get_rng_state(), state), "nothing has been drawn"
