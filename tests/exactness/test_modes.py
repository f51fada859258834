"""What the caller has entered is in force inside the workers: dispatch modes, function modes, context variables."""

import contextvars
import copy

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from pipework import Pipe

MODES = ["never", "except_last", "always"]


class CountDispatch(TorchDispatchMode):
    """Counts matrix products, in the way of someone who thinks of one thread only."""

    def __init__(self) -> None:
        super().__init__()
        self.products = 0
        self.depth = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert self.depth == 0, "two threads are inside at once"
        self.depth += 1
        before = self.products
        result = func(*args, **(kwargs or {}))
        self.products = before + (func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm))
        self.depth -= 1
        return result


class Doubling(TorchFunctionMode):
    """Changes results, so that a layer which does not see it computes something else."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        return result * 2 if func is torch.tanh else result


class Tanh(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x)


def model() -> nn.Sequential:
    return nn.Sequential(*(layer for _ in range(3) for layer in (nn.Linear(8, 8), Tanh())))


def pipe_of(module: nn.Sequential, checkpoint: str = "never") -> Pipe:
    return Pipe(copy.deepcopy(module), 4, checkpoint, balance=[2, 2, 2], devices=["cpu"] * 3)


@pytest.mark.parametrize("checkpoint", MODES)
def test_a_flop_counter_counts_what_it_counts_for_the_plain_model(checkpoint: str) -> None:
    module, x = model(), torch.randn(12, 8)
    pipe = pipe_of(module, checkpoint)
    with FlopCounterMode(display=False) as plain_forward:
        loss = module(x).sum()
    with FlopCounterMode(display=False) as plain_backward:
        loss.backward()
    with FlopCounterMode(display=False) as forward:
        loss = pipe(x).sum()
    with FlopCounterMode(display=False) as backward:
        loss.backward()
    assert forward.get_total_flops() == plain_forward.get_total_flops()
    recomputed = {"never": 0, "except_last": 3, "always": 4}[checkpoint] * plain_forward.get_total_flops() // 4
    assert backward.get_total_flops() == plain_backward.get_total_flops() + recomputed


def test_a_mode_is_used_by_one_worker_at_a_time() -> None:
    pipe, x = pipe_of(model()), torch.randn(12, 8)
    for _ in range(10):
        with CountDispatch() as mode:
            pipe(x).sum().backward()
        assert mode.products == 3 * 4 + (3 * 4 + 2 * 4)  # F; then for each weight, and each input but the first


@pytest.mark.parametrize("checkpoint", MODES)
def test_a_function_mode_changes_the_same_results(checkpoint: str) -> None:
    module, x = model(), torch.randn(12, 8)
    pipe = pipe_of(module, checkpoint)
    with Doubling():
        expected, output = module(x), pipe(x)
    torch.testing.assert_close(output, expected)
    output.sum().backward()
    assert not torch.equal(output, module(x)), "the mode does nothing"


def test_modes_end_with_their_context() -> None:
    module, x = model(), torch.randn(12, 8)
    pipe = pipe_of(module)
    with CountDispatch() as mode, Doubling():
        pipe(x)
    seen = mode.products
    torch.testing.assert_close(pipe(x), module(x))
    assert mode.products == seen


def test_the_modes_of_a_backward_are_those_around_it() -> None:
    pipe, x = pipe_of(model()), torch.randn(12, 8)
    with CountDispatch() as forward:
        loss = pipe(x).sum()
    with CountDispatch() as backward:
        loss.backward()
    assert (forward.products, backward.products) == (12, 20)


def test_an_error_in_a_mode_is_the_callers_and_the_pipe_goes_on() -> None:
    class Refusing(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func is torch.ops.aten.tanh.default:
                raise ValueError("no tanh here")
            return func(*args, **(kwargs or {}))

    module, x = model(), torch.randn(12, 8)
    pipe = pipe_of(module)
    with Refusing(), pytest.raises(ValueError, match="no tanh here") as caught:
        pipe(x)
    assert any("in layer '1' (Tanh)" in note for note in caught.value.__notes__)
    torch.testing.assert_close(pipe(x), module(x))


@pytest.mark.parametrize("checkpoint", MODES)
def test_context_variables_reach_the_layers(checkpoint: str) -> None:
    scale = contextvars.ContextVar("scale", default=1.0)

    class Scale(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * scale.get()

    pipe = Pipe(nn.Sequential(Scale(), Scale()), 2, checkpoint, balance=[1, 1], devices=["cpu"] * 2)
    x = torch.ones(4, 1, requires_grad=True)
    token = scale.set(3.0)
    pipe(x).sum().backward()
    assert torch.equal(x.grad, torch.full((4, 1), 9.0))
    scale.reset(token)
    assert torch.equal(pipe(x), x)
