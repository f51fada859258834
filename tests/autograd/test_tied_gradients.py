"""Parameters that several stages of a process use: gradients as in one graph, and no memory that nobody needs."""

import copy
import gc
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipework import Pipe
from pipework.autograd.aliases import Aliases
from pipework.autograd.tied_gradients import tied_gradients
from tests.conftest import WAYS, bitwise, distance


class Uses(nn.Module):
    """Uses a weight several times, so that the order in which its gradient is added up shows."""

    def __init__(self, weight: nn.Parameter, times: int) -> None:
        super().__init__()
        self.weight, self.times = weight, times

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.times):
            x = (x @ self.weight.t()).tanh() @ self.weight + x
        return x


def model() -> nn.Sequential:
    weight = nn.Parameter(torch.randn(6, 6))
    other = nn.Linear(6, 6)
    return nn.Sequential(
        nn.Linear(6, 6), Uses(weight, 2), other, Uses(weight, 1), nn.Tanh(), Uses(weight, 3), other, nn.Linear(6, 1)
    )


@pytest.mark.one_process("between processes each sums its own part first")
@pytest.mark.parametrize("balance", [[4, 4], [2, 2, 2, 2], [1] * 8], ids=str)
def test_the_order_of_the_sum_is_that_of_one_graph(
    way: Any, balance: list[int], checkpoint: str, assert_trained_alike: Any
) -> None:
    plain = model()
    pipe = way.pipe(plain, 4, checkpoint, balance=balance)
    assert_trained_alike(plain, pipe, [(torch.randn(7, 6),) for _ in range(2)], way=way)


@pytest.mark.one_process("between processes each sums its own part first")
def test_a_retained_graph_is_differentiated_again() -> None:
    plain = model()
    pipe = WAYS["outside"].pipe(plain, 3, "never", balance=[4, 4])
    x = torch.randn(6, 6)
    loss = pipe(x).square().sum()
    loss.backward(retain_graph=True)
    once = [parameter.grad.clone() for parameter in pipe.parameters()]
    loss.backward()
    for parameter, gradient in zip(pipe.parameters(), once, strict=True):
        bitwise(parameter.grad, 2 * gradient)


def test_hooks_fire_once_and_a_frozen_parameter_gets_nothing() -> None:
    layers = model()
    pipe = Pipe(layers, 3, balance=[4, 4], devices=["cpu"] * 2)
    fired: list[Tensor] = []
    layers[1].weight.register_hook(fired.append)
    pipe(torch.randn(6, 6)).sum().backward()
    assert len(fired) == 1
    layers[1].weight.requires_grad_(False)
    layers.zero_grad()
    pipe(torch.randn(6, 6)).sum().backward()
    assert layers[1].weight.grad is None
    assert layers[2].weight.grad is not None


@pytest.mark.thorough
@pytest.mark.parametrize("schedule", ["gpipe", "zb-h1"])
def test_a_failed_step_keeps_no_gradient(schedule: str) -> None:
    class Fails(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            if x.requires_grad:
                x.register_hook(self.fail)
            return x

        def fail(self, gradient: Tensor) -> None:
            raise ValueError("no gradient")

    layers = model()
    layers.insert(3, Fails())
    pipe = Pipe(layers, 3, balance=[3, 6], devices=["cpu"] * 2, schedule=schedule, loss_fn=distance)
    x, y = torch.randn(6, 6), torch.randn(6)

    def alive() -> int:
        gc.collect()
        return sum(type(each) is Tensor and each.shape == (6, 6) for each in gc.get_objects())

    before = None
    for _ in range(3):
        with pytest.raises(ValueError, match="no gradient"):
            pipe(x, target=y).backward()
        before = alive() if before is None else before
    assert alive() <= before


def no_link(source: int, target: int) -> None:
    """Tensors are passed by reference."""


def test_only_shared_parameters_are_tied() -> None:
    layers = copy.deepcopy(model())
    stages = {number: Aliases([layer]) for number, layer in enumerate(layers)}
    assert sorted(tied_gradients(stages, no_link)) == [1, 2, 3, 5, 6]
    assert tied_gradients({0: Aliases([nn.Sequential(layers[0], layers[1])]), 1: Aliases([layers[7]])}, no_link) == {}


def in_three_stages() -> dict[int, Aliases]:
    weight = nn.Parameter(torch.zeros(2))
    holders = [nn.Module() for _ in range(3)]
    for holder in holders:
        holder.weight = weight
    return {number: Aliases([holder]) for number, holder in enumerate(holders)}


def test_a_gradient_travels_as_a_message() -> None:
    sent: dict[tuple[str, int], Any] = {}

    def sender(name: str, stage: int) -> Any:
        return lambda micro_batch, message: sent.__setitem__((name, stage), message)

    def receiver(name: str, stage: int) -> Any:
        return lambda micro_batch: sent.pop((name, stage), ((torch.ones(1),), None))

    stages = in_three_stages()
    linked: list[tuple[int, int]] = []
    tied = tied_gradients(stages, lambda *ends: linked.append(ends))
    assert linked == [(1, 0), (2, 1)]
    for each in tied.values():
        each.open(sender, receiver)
    stages[2].leaves[0].grad = torch.full((2,), 2.0)
    assert tied[2].hand_on(0) == [stages[2].leaves[0]]
    tied[2].send_gradients(None, 0, ((), None))
    assert [stage for _, stage in sent] == [1]
    assert tied[1].receive_gradients(receiver("B", 1), 0) == ((torch.ones(1),), None)
    ((alias, gradient),) = tied[1].begun(0)
    assert alias is stages[1].leaves[0]
    assert gradient.tolist() == [2.0, 2.0]
    # Nothing was differentiated here: the stage before is told.
    tied[1].send_gradients(None, 0, ((), None))
    assert sent == {("B tied 0", 0): ((None,), None)}
