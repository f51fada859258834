"""Layers that do with a parameter, or with what an operator makes of it, what the split must see; bitwise."""

import contextlib
import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from pipework import Pipe
from tests.conftest import WAYS, bitwise

CHUNKS = 4


class Layer(nn.Module):
    """A linear layer, and what is done with it."""

    def __init__(self, act: Callable[[Any, Tensor], Tensor], *, bias: bool = True) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6, bias=bias)
        self.act = act

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self, x)


def overwritten(layer: Any, x: Tensor) -> Tensor:
    return F.relu_(layer.linear(x))


def overwritten_in_part(layer: Any, x: Tensor) -> Tensor:
    y = layer.linear(x)
    y[:, 0] = 0
    return y


def added_to(layer: Any, x: Tensor) -> Tensor:
    y = layer.linear(x)
    y += x
    return y


def masked(layer: Any, x: Tensor) -> Tensor:
    return layer.linear(x).masked_fill_(x > 0, 0.5)


def hooked(layer: Any, x: Tensor) -> Tensor:
    y = layer.linear(x)
    if y.requires_grad:
        y.register_hook(lambda gradient: 3 * gradient)
    return y


def hooked_and_overwritten(layer: Any, x: Tensor) -> Tensor:
    return F.relu_(hooked(layer, x))


def hooked_parameter(layer: Any, x: Tensor) -> Tensor:
    y = layer.linear(x)
    if y.requires_grad:
        layer.linear.weight.register_hook(lambda gradient: 2 * gradient).remove()
    return y


def frozen_in_between(layer: Any, x: Tensor) -> Tensor:
    first = layer.linear(x)
    layer.linear.requires_grad_(False)
    second = layer.linear(first.tanh())
    layer.linear.requires_grad_(True)
    return second


def penalised(layer: Any, x: Tensor) -> Tensor:
    y = layer.linear(x)
    if not x.requires_grad:
        return y
    (gradient,) = torch.autograd.grad(y.pow(2).sum(), x, create_graph=True)
    return y + gradient


def written_into(layer: Any, x: Tensor) -> Tensor:
    o = torch.zeros(6, 6)
    o[:] = layer.linear.weight
    return layer.linear(x) @ o


def copied(layer: Any, x: Tensor) -> Tensor:
    assert type(copy.deepcopy(layer.linear).weight) is not type(layer.linear.weight)
    return layer.linear(x)


def kept_as_attribute(layer: Any, x: Tensor) -> Tensor:
    layer.same = layer.linear.weight
    return layer.linear(x)


ACTS = [
    overwritten, overwritten_in_part, added_to, masked, hooked, hooked_and_overwritten, hooked_parameter,
    frozen_in_between, penalised, written_into,
]  # fmt: skip


@pytest.mark.parametrize("way", ["1f1b", "zb-h1", "zb-v"], indirect=True)
@pytest.mark.parametrize("checkpoint", ["never", "except_last"])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(8, 6), (8, 5, 6), (8, 2, 3, 6)], ids=["2d", "3d", "4d"])
@pytest.mark.parametrize("act", ACTS)
def test_gradients_are_those_of_the_model_itself(
    way: Any,
    checkpoint: str,
    bias: bool,
    shape: tuple[int, ...],
    act: Callable[[Any, Tensor], Tensor],
    assert_trained_alike: Any,
) -> None:
    if act is penalised and checkpoint != "never":
        pytest.skip("a checkpointed layer has no graph to differentiate in its first pass")
    torch.manual_seed(0)
    plain = nn.Sequential(Layer(act, bias=bias), Layer(act, bias=bias), nn.Linear(6, 6), nn.Linear(6, 1))
    pipe = way.pipe(copy.deepcopy(plain), CHUNKS, checkpoint, balance=[1] * 4)
    assert_trained_alike(plain, pipe, [(torch.randn(shape),) for _ in range(2)], way=way, same=bitwise)


@pytest.mark.parametrize("way", ["zb-h1"], indirect=True)
@pytest.mark.parametrize("watched", [False, True], ids=["", "in_a_mode"])
def test_what_a_layer_keeps_or_copies_is_no_parameter_of_it(way: Any, watched: bool) -> None:
    pipe = way.pipe(nn.Sequential(Layer(kept_as_attribute), Layer(copied)), CHUNKS, "never", balance=[1, 1])
    names = list(pipe.state_dict())
    with FlopCounterMode(display=False) if watched else contextlib.nullcontext():
        for _ in range(2):
            way.loss(pipe, torch.randn(8, 6), torch.randn(8)).backward()
    assert list(pipe.state_dict()) == names


class Scaled(Tensor):
    """A parameter of a class that has a linear layer of its own."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            if func is F.linear:
                return func(args[0], 3 * args[1].as_subclass(Tensor), *args[2:])
            result = func(*args, **(kwargs or {}))
        return result.as_subclass(Scaled) if func is Tensor.detach else result


@pytest.mark.one_process("watches what all layers do, in one process")
def test_a_parameter_of_a_class_of_its_own_keeps_its_operators() -> None:
    x, y = torch.randn(8, 6), torch.randn(8, 1)
    gradients = []
    for name in ("1f1b", "zb-h1"):
        torch.manual_seed(0)
        layers = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 1))
        layers[0].weight = nn.Parameter(layers[0].weight.detach().as_subclass(Scaled))
        pipe = Pipe(
            layers, CHUNKS, "never", balance=[1, 1], devices=["cpu"] * 2, schedule=name, loss_fn=F.mse_loss
        )  # fmt: skip
        pipe(x, target=y).backward()
        gradients.append(layers[0].weight.grad.as_subclass(Tensor))
    bitwise(gradients[1], gradients[0])


class Summed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 6))

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("ij,kj->ik", x, self.weight)


def test_watching_a_pipe_changes_nothing_for_operators_without_a_formula() -> None:
    pipe = WAYS["zb-h1"].pipe(nn.Sequential(Summed(), Summed()), CHUNKS, "never", balance=[1, 1])
    x, y = torch.randn(8, 6), torch.randn(8)

    def step() -> None:
        WAYS["zb-h1"].loss(pipe, x, y).backward()

    step()
    with pipe.record() as recording:
        step()
    with pipe.record() as again:
        step()
    rows = 4 * 6 * 8 // CHUNKS  # bytes of a micro-batch
    assert list(recording.costs().waiting) == list(again.costs().waiting) == [2 * rows, 2 * rows]


@pytest.mark.parametrize("first", ["weight", "bias"])
def test_thawing_one_parameter_does_not_keep_the_other_from_waiting(first: str) -> None:
    layers = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 1))
    pipe = WAYS["zb-h1"].pipe(layers, CHUNKS, "never", balance=[1, 1], share=True)
    frozen = getattr(layers[0], first)

    def step() -> list[float]:
        with pipe.record() as recording:
            WAYS["zb-h1"].loss(pipe, torch.randn(8, 6), torch.randn(8)).backward()
        return list(recording.costs().waiting)

    step()
    usual = step()
    frozen.requires_grad_(False)
    step()
    frozen.requires_grad_(True)
    step()
    assert step() == usual
