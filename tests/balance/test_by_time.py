import itertools
import time

import pytest
import torch
from torch import nn

from pipework.balance import balance_by_time


class Slow(nn.Module):
    """Takes some milliseconds, in forward or in backward."""

    def __init__(self, forward=0.0, backward=0.0):
        super().__init__()
        self.milliseconds = forward, backward
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, x):
        return Sleep.apply(x * self.weight, *self.milliseconds)


class Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, forward, backward):
        time.sleep(forward / 1000)
        ctx.backward_milliseconds = backward
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        time.sleep(ctx.backward_milliseconds / 1000)
        return grad, None, None


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_balances_both_directions(direction):
    module = nn.Sequential(*(Slow(**{direction: 5 * times}) for times in [1, 2, 3, 4, 5, 6]))
    assert balance_by_time(2, module, torch.rand(2, 2), timeout=0.4, device="cpu") == [4, 2]


def test_the_median_forgets_one_slow_pass(monkeypatch):
    passes = itertools.chain(
        [[9.0, 9.0, 9.0]], [[1.0, 1.0, 2.0]], [[50.0, 1.0, 2.0]], itertools.repeat([1.0, 1.0, 2.0])
    )

    def measured(module, value, device):
        time.sleep(0.001)
        return next(passes)

    monkeypatch.setattr("pipework.balance.by_time._pass", measured)
    assert balance_by_time(2, nn.Sequential(*[nn.ReLU()] * 3), torch.rand(1), timeout=0.05, device="cpu") == [2, 1]


def test_leaves_no_trace(delicate, untouched):
    x = torch.rand(6, 4, requires_grad=True)
    with untouched(delicate), torch.no_grad():
        balance_by_time(2, delicate, x, timeout=0, device="cpu")
    assert x.grad is None


def test_layers_run_in_training_mode_but_a_frozen_part_stays_frozen():
    seen = []

    class Note(nn.Module):
        def forward(self, x):
            seen.append(self.training)
            return x

    module = nn.Sequential(Note(), Note())
    module[1].eval()
    balance_by_time(1, module, torch.rand(1), timeout=0, device="cpu")
    assert seen[:2] == [True, False]
    seen.clear()
    balance_by_time(1, module.eval(), torch.rand(1), timeout=0, device="cpu")
    assert seen[:2] == [True, True]
    assert not module.training


def test_integers_frozen_layers_and_detached_outputs_are_fine():
    class Detach(nn.Module):
        def forward(self, x):
            return x.detach()

    module = nn.Sequential(nn.Embedding(3, 2), Detach(), nn.ReLU(), nn.Linear(2, 2).requires_grad_(False))
    assert sum(balance_by_time(3, module, torch.tensor([0, 2]), timeout=0, device="cpu")) == 4


@pytest.mark.gpu
def test_runs_on_an_accelerator_and_leaves_the_module_where_it_is(delicate, untouched):
    state = torch.get_device_module().get_rng_state()
    with untouched(delicate):
        assert sum(balance_by_time(2, delicate, torch.rand(6, 4), timeout=0)) == 5
    assert torch.equal(torch.get_device_module().get_rng_state(), state)


def test_refuses_a_module_with_gradients():
    module = nn.Sequential(nn.Linear(1, 1))
    module(torch.rand(1, 1)).sum().backward()
    with pytest.raises(ValueError, match=r"some parameter already has gradient: '0\.weight'; call zero_grad"):
        balance_by_time(1, module, torch.rand(1, 1))


@pytest.mark.parametrize(("partitions", "message"), [(0, "at least 1, got 0"), (2, "cannot make 2 partitions of 1")])
def test_refuses_a_wrong_number_of_partitions(partitions, message):
    with pytest.raises(ValueError, match=message):
        balance_by_time(partitions, nn.Sequential(nn.ReLU()), torch.rand(1))
