import itertools
import time

import pytest
import torch
from torch import nn

from pipework import balance_by_time


class Clock:
    """Stands for the real one, which a busy machine disturbs."""

    def __init__(self):
        self.milliseconds = 0.0

    def now(self, device):
        return self.milliseconds / 1000


class Slow(nn.Module):
    """Takes some milliseconds of a clock, in forward or in backward."""

    def __init__(self, clock, forward=0.0, backward=0.0):
        super().__init__()
        self.clock = clock
        self.milliseconds = forward, backward
        self.weight = nn.Parameter(torch.ones(()))

    def __deepcopy__(self, memo):
        return Slow(self.clock, *self.milliseconds)

    def forward(self, x):
        return Sleep.apply(x * self.weight, self.clock, *self.milliseconds)


class Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, clock, forward, backward):
        clock.milliseconds += forward
        ctx.clock, ctx.backward_milliseconds = clock, backward
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        ctx.clock.milliseconds += ctx.backward_milliseconds
        return grad, None, None, None


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_balances_both_directions(direction, monkeypatch):
    clock = Clock()
    monkeypatch.setattr("pipework.planning.balance.by_time.now", clock.now)
    module = nn.Sequential(*(Slow(clock, **{direction: times}) for times in [1, 2, 3, 4, 5, 6]))
    assert balance_by_time(2, module, torch.rand(2, 2), timeout=0, device="cpu") == [4, 2]


def test_the_median_forgets_one_slow_pass(monkeypatch):
    passes = itertools.chain(
        [[9.0, 9.0, 9.0]], [[1.0, 1.0, 2.0]], [[50.0, 1.0, 2.0]], itertools.repeat([1.0, 1.0, 2.0])
    )

    def measured(module, value, device):
        time.sleep(0.001)
        return next(passes)

    monkeypatch.setattr("pipework.planning.balance.by_time._pass", measured)
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
    x = torch.rand(6, 4)
    state = torch.get_device_module().get_rng_state()
    with untouched(delicate):
        assert sum(balance_by_time(2, delicate, x, timeout=0)) == 5
    assert torch.equal(torch.get_device_module().get_rng_state(), state)


def test_layers_that_overwrite_their_input_are_fine_and_the_sample_stays_as_it_is():
    module = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(2, 2), nn.ReLU(inplace=True), nn.Linear(2, 2))
    for requires_grad in (False, True):
        sample = torch.tensor([[-1.0, 1.0]], requires_grad=requires_grad)
        assert sum(balance_by_time(2, module, sample, timeout=0)) == 4
        assert sample.tolist() == [[-1, 1]]


def test_refuses_a_module_with_gradients():
    module = nn.Sequential(nn.Linear(1, 1))
    module(torch.rand(1, 1)).sum().backward()
    with pytest.raises(ValueError, match=r"some parameter already has gradient: '0\.weight'; call zero_grad"):
        balance_by_time(1, module, torch.rand(1, 1))


@pytest.mark.parametrize(("partitions", "message"), [(0, "at least 1, got 0"), (2, "cannot make 2 partitions of 1")])
def test_refuses_a_wrong_number_of_partitions(partitions, message):
    with pytest.raises(ValueError, match=message):
        balance_by_time(partitions, nn.Sequential(nn.ReLU()), torch.rand(1))


def test_on_mixed_devices_each_layer_counts_with_its_time_on_the_device_that_runs_it(monkeypatch):
    # The meta device stands for a second kind that is always there.
    monkeypatch.setattr(
        "pipework.planning.balance.by_time._pass",
        lambda module, value, device: [{"cpu": 2.0, "meta": 8.0}[device.type]] * len(module),
    )
    module = nn.Sequential(*(nn.ReLU() for _ in range(5)))
    assert balance_by_time(2, module, torch.rand(2), timeout=0, devices=["cpu", "meta"]) == [4, 1]
    assert balance_by_time(2, module, torch.rand(2), timeout=0, devices=["meta", "cpu"]) == [1, 4]


def test_layers_really_run_on_each_device():
    seen = []

    class Note(nn.Module):
        def forward(self, x):
            seen.append(x.device.type)
            return x + 1

    balance_by_time(2, nn.Sequential(Note(), Note()), torch.rand(2), timeout=0, devices=["cpu", "meta"])
    assert set(seen) == {"cpu", "meta"}


def test_mixed_devices_leave_no_trace(delicate, untouched):
    x = torch.rand(6, 4)
    with untouched(delicate):
        balance_by_time(2, delicate, x, timeout=0, devices=["cpu", "meta"])


@pytest.mark.gpu
def test_a_cpu_beside_an_accelerator_gets_fewer_layers():
    module = nn.Sequential(*(nn.Linear(2048, 2048) for _ in range(12)))
    counts = balance_by_time(2, module, torch.rand(512, 2048), devices=["cpu", torch.accelerator.current_accelerator()])
    assert counts[0] < counts[1]


def test_cpu_workers_are_timed_with_their_share_of_the_threads():
    seen = []

    class Note(nn.Module):
        def forward(self, x):
            seen.append(torch.get_num_threads())
            return x

    before = torch.get_num_threads()
    try:
        torch.set_num_threads(4)
        balance_by_time(2, nn.Sequential(Note(), Note()), torch.rand(1), timeout=0, devices=["cpu"] * 4)
        assert set(seen) == {2}
        seen.clear()
        balance_by_time(2, nn.Sequential(Note(), Note()), torch.rand(1), timeout=0, device="cpu")
        assert set(seen) == {4}
        assert torch.get_num_threads() == 4
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"device": "cpu", "devices": ["cpu", "cpu"]}, ValueError, "either device=.* or devices="),
        ({"devices": ["cpu"]}, IndexError, r"too few devices .*devices: 1, partitions: 2"),
        ({"devices": "cpu"}, TypeError, r"must be a list .*\['cpu'\]\?"),
    ],
)
def test_devices_that_do_not_fit_are_refused(arguments, error, message):
    with pytest.raises(error, match=message):
        balance_by_time(2, nn.Sequential(nn.ReLU(), nn.ReLU()), torch.rand(1), **arguments)
