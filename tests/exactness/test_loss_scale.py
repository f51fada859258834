"""A factor of the loss that is inside: it is in the gradients before layers see them."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from pipework.testing import draw_key, reference_step
from tests.ranks import held

INSIDE = ("gpipe", "1f1b", "interleaved-1f1b", "zb-h1")
inside = pytest.mark.parametrize("way", INSIDE, indirect=True)


class Clamped(nn.Module):
    """Its backward is not linear: gradients are clamped."""

    def forward(self, x: Tensor) -> Tensor:
        y = x * 1.0
        if y.requires_grad:
            y.register_hook(lambda gradient: gradient.clamp(-0.003, 0.003))
        return y


class AddAuxiliary(torch.autograd.Function):
    """Adds the gradient of an auxiliary loss, whatever the gradient of the main one is."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return gradient + 0.1 * x


class Auxiliary(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return AddAuxiliary.apply(x)


def layers(*nonlinear: nn.Module) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(4, 8), nn.Tanh(), *nonlinear, nn.Dropout(0.3), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4)
    )


def same_gradients(pipe: nn.Module, plain: nn.Module) -> bool:
    pairs = zip(pipe.parameters(), plain.parameters(), strict=True)
    return all(torch.equal(one.grad, other.grad) for one, other in pairs)


def of_positive(output: Tensor, target: Tensor) -> Tensor:
    """The mean over positive targets."""
    return functional.mse_loss(output, target, weight=(target > 0).to(output.dtype))


OPTIONS: dict[str, dict[str, Any]] = {
    "mean": {"loss_fn": functional.mse_loss},
    "sum": {"loss_fn": partial(functional.mse_loss, reduction="sum"), "loss_reduction": "sum"},
    "weights": {"loss_fn": of_positive, "loss_weight": lambda target: (target > 0).sum()},
}


@inside
@pytest.mark.parametrize("checkpoint", ["never", "always"])
@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("nonlinear", [Clamped, Auxiliary])
def test_accumulated_gradients_are_those_of_the_plain_model(
    way: Any, checkpoint: str, name: str, nonlinear: Callable[[], nn.Module]
) -> None:
    plain, options = layers(nonlinear()), OPTIONS[name]
    pipe = way.pipe(plain, 3, checkpoint, balance=[2, 2, 2, 1], **options)
    for scale in (1 / 3, 0.7, torch.tensor(1 / 4, device="cpu")):
        x, y = torch.randn(7, 4), torch.randn(7, 4)
        torch.manual_seed(1)
        loss = pipe(x, target=y, loss_scale=scale)
        loss.backward()
        torch.manual_seed(1)
        expected = reference_step(plain, x, y, chunks=3, key=draw_key(), loss_scale=float(scale), **options)
        assert torch.equal(loss, expected.loss)
    assert same_gradients(pipe, held(plain, pipe))
    for model in (plain, pipe):
        model.eval()
    with torch.no_grad():
        loss, output = pipe(x, target=y, return_output=True)
        scaled, same = pipe(x, target=y, return_output=True, loss_scale=0.25)
    assert torch.equal(scaled, loss * 0.25)
    assert output is same is None or torch.equal(output, same)


@inside
def test_a_power_of_two_inside_is_one_outside_if_backwards_are_linear(way: Any) -> None:
    plain, x, y = layers(), torch.randn(7, 4), torch.randn(7, 4)
    one, other = (way.pipe(plain, 3, balance=[2, 2, 1, 1], loss_fn=functional.mse_loss) for _ in range(2))
    clamped = way.pipe(layers(Clamped()), 3, balance=[2, 2, 2, 1], loss_fn=functional.mse_loss)
    torch.manual_seed(1)
    loss = one(x, target=y, loss_scale=1 / 8)
    loss.backward()
    torch.manual_seed(1)
    outside = other(x, target=y) / 8  # of an own factor outside, gradients are there already
    outside.backward()
    assert torch.equal(loss, outside)
    assert same_gradients(one, other)
    norms = []
    for inner, outer in ((1.0, 1 / 8), (1 / 8, 1.0)):
        clamped.zero_grad()
        torch.manual_seed(1)
        (clamped(x, target=y, loss_scale=inner) * outer).backward()
        norms.append(clamped.clip_grad_norm_(float("inf")).item())
    assert norms[0] < 0.98 * norms[1]  # gradients were clamped before they were divided


@inside
def test_a_scaler_and_a_scale(way: Any) -> None:
    plain, x, y = layers(Clamped()), torch.randn(7, 4), torch.randn(7, 4)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**-3)
    pipe = way.pipe(plain, 3, balance=[2, 2, 2, 1], loss_fn=functional.mse_loss, grad_scaler=scaler)
    torch.manual_seed(1)
    scaler.scale(pipe(x, target=y, loss_scale=1 / 2)).backward()
    torch.manual_seed(1)
    reference_step(plain, x, y, functional.mse_loss, chunks=3, key=draw_key(), loss_scale=1 / 16)
    assert same_gradients(pipe, held(plain, pipe))


NONE = (0, True, -1.0, float("nan"), float("inf"), "1", torch.ones(1), nn.Parameter(torch.ones(())))


@pytest.mark.one_process("a call that is refused ends a pipe of processes: tests/distributed/together")
@pytest.mark.parametrize("way", ["gpipe"], indirect=True)
@pytest.mark.parametrize("scale", NONE, ids=str)
def test_what_is_no_scale_is_refused(way: Any, scale: Any) -> None:
    pipe, x = way.pipe(layers(), 3, balance=[2, 2, 1, 1], loss_fn=functional.mse_loss), torch.randn(7, 4)
    with pytest.raises(ValueError, match=r"(?s)loss_scale is .*: wanted a positive number, or a 0-dimensional tensor"):
        pipe(x, target=x, loss_scale=scale)
