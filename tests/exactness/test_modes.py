"""What the caller has entered is in force inside the workers: dispatch modes, function modes, context variables."""

import contextvars
import copy
import weakref
from typing import Any

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from pipework import Pipe
from tests.ranks import held


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


BALANCE = [1, 2, 1, 2]


@pytest.mark.one_process("watches what all layers do, in one process")
def test_a_flop_counter_counts_what_it_counts_for_the_plain_model(way: Any, checkpoint: str) -> None:
    module, x, y = model(), torch.randn(12, 8), torch.randn(12)
    pipe = way.pipe(module, 4, checkpoint, balance=BALANCE)
    with FlopCounterMode(display=False) as plain_forward:
        loss = module(x).sum()
    with FlopCounterMode(display=False) as plain_backward:
        loss.backward()
    with FlopCounterMode(display=False) as forward:
        loss = way.loss(pipe, x, y)
    with FlopCounterMode(display=False) as backward:
        loss.backward()
    linears = [sum(isinstance(layer, nn.Linear) for layer in partition) for partition in pipe.partitions]
    again = sum(linears[each.stage] for order in pipe.schedule().orders for each in order if each.kind == "R")
    assert bool(again) == (checkpoint != "never")
    recomputed = again * plain_forward.get_total_flops() // (sum(linears) * pipe.chunks)
    expected = [plain_forward.get_total_flops(), plain_backward.get_total_flops() + recomputed]
    if way.inside:  # all has been done when the loss is there
        expected = [sum(expected), 0]
    assert [forward.get_total_flops(), backward.get_total_flops()] == expected


@pytest.mark.one_process("watches what all layers do, in one process")
def test_a_mode_is_used_by_one_worker_at_a_time(way: Any) -> None:
    pipe, x, y = way.pipe(model(), 4, "never", balance=BALANCE), torch.randn(12, 8), torch.randn(12)
    for _ in range(10):
        with CountDispatch() as mode:
            way.loss(pipe, x, y).backward()
        assert mode.products == 3 * 4 + (3 * 4 + 2 * 4)  # F; then for each weight, and each input but the first


def test_a_function_mode_changes_the_same_results(way: Any, checkpoint: str) -> None:
    module, x, y = model(), torch.randn(12, 8), torch.randn(12)
    pipe = way.pipe(module, 4, checkpoint, balance=BALANCE)
    with Doubling():
        expected = way.reference(module, x, y, 4, key=0)
        loss, output = way.run(pipe, x, y)
    assert torch.equal(output, expected.output)
    loss.backward()
    assert not torch.equal(output, module(x)), "the mode does nothing"
    pairs = zip(pipe.parameters(), held(module, pipe).parameters(), strict=True)
    if way.inside:  # otherwise the recomputation has what is around `backward()`
        assert all(torch.equal(a.grad, b.grad) for a, b in pairs)


@pytest.mark.one_process("watches what all layers do, in one process")
def test_modes_end_with_their_context() -> None:
    module, x = model(), torch.randn(12, 8)
    pipe = pipe_of(module)
    with CountDispatch() as mode, Doubling():
        pipe(x)
    seen = mode.products
    torch.testing.assert_close(pipe(x), module(x))
    assert mode.products == seen


def test_context_variables_reach_the_layers(way: Any, checkpoint: str) -> None:
    scale = contextvars.ContextVar("scale", default=1.0)

    class Scale(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * scale.get()

    def total(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return (output * target).sum() * scale.get()

    module = nn.Sequential(*(Scale() for _ in range(4)))
    pipe = way.pipe(module, 2, checkpoint, balance=[1, 1, 1, 1], loss_fn=total, loss_reduction="sum")
    x = torch.ones(4, 1, requires_grad=True)
    token = scale.set(3.0)
    way.loss(pipe, x, torch.ones(4, 1), total).backward()
    assert torch.equal(x.grad, torch.full((4, 1), 3.0**5))
    scale.reset(token)
    with torch.no_grad():
        assert torch.equal(pipe(x), x)


@pytest.mark.one_process("looks at what threads see")
def test_with_the_loss_outside_a_backward_sees_the_variables_around_it() -> None:
    name, seen = contextvars.ContextVar("name", default=""), []

    class Look(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            seen.append(name.get())
            return x * 2

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            seen.append(name.get())
            return gradient * 2

    class Layer(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return Look.apply(x)

    pipe = Pipe(nn.Sequential(Layer(), Layer()), 2, "never", balance=[1, 1], devices=["cpu", "cpu"])
    name.set("forward")
    output = pipe(torch.ones(4, 1, requires_grad=True))
    name.set("backward")
    output.sum().backward()
    assert seen == ["forward"] * 4 + ["backward"] * 4


@pytest.mark.one_process("looks at what one process keeps")
@pytest.mark.parametrize("inside", [True, False])
def test_a_variable_that_holds_the_loss_keeps_nothing_alive(inside: bool) -> None:
    kept: contextvars.ContextVar[Any] = contextvars.ContextVar("kept")
    layers = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    pipe = Pipe(layers, 2, balance=[1, 1], devices=["cpu", "cpu"], loss_fn=nn.functional.mse_loss)

    def call() -> weakref.ref[torch.Tensor]:
        kept.set(None)
        x = torch.randn(4, 4)
        loss = pipe(x, target=x) if inside else nn.functional.mse_loss(pipe(x), x)
        kept.set(loss)
        return weakref.ref(loss)

    loss = contextvars.copy_context().run(call)
    assert loss() is None
