"""Balances that are measured."""

import pytest
import torch
from torch import nn

from pipework import balance_by_size, balance_by_time
from pipework.planning.layer_costs import LayerSeconds
from pipework.planning.measuring.stage_copy import measure_stages


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
    monkeypatch.setattr("pipework.planning.measuring.stage_copy.now", clock.now)
    module = nn.Sequential(*(Slow(clock, **{direction: times}) for times in [1, 2, 3, 4, 5, 6]))
    assert balance_by_time(2, module, torch.rand(2, 2), timeout=0, device="cpu") == [4, 2]


@pytest.mark.parametrize("options", [{"device": "cpu"}, {"devices": ["cpu", "meta"]}])
def test_leaves_no_trace(delicate, untouched, options):
    x = torch.rand(6, 4, requires_grad=True)
    with untouched(delicate), torch.no_grad():
        balance_by_time(2, delicate, x, timeout=0, **options)
    delicate[0].weight.grad = torch.ones(4, 4)
    with untouched(delicate), torch.no_grad():
        balance_by_size(2, delicate, x, device="cpu")
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
    assert (seen[0], seen[-1]) == (True, False)
    seen.clear()
    balance_by_time(1, module.eval(), torch.rand(1), timeout=0, device="cpu")
    assert (seen[0], seen[-1]) == (True, True)
    assert not module.training


@pytest.mark.gpu
def test_runs_on_an_accelerator_and_leaves_the_module_where_it_is(delicate, untouched):
    x = torch.rand(6, 4)
    state = torch.get_device_module().get_rng_state()
    with untouched(delicate):
        assert sum(balance_by_time(2, delicate, x, timeout=0)) == 5
    assert torch.equal(torch.get_device_module().get_rng_state(), state)


def test_on_mixed_devices_each_layer_counts_with_its_time_on_the_device_that_runs_it(monkeypatch):
    # The meta device stands for a second kind that is always there.
    def measured(stages, places, *rest, **options):
        seconds = LayerSeconds({"cpu": 2.0, "meta": 8.0}[places[0].type], 0.0, 0.0)
        return [each._replace(seconds=seconds) for each in measure_stages(stages, places, *rest, **options)]

    monkeypatch.setattr("pipework.planning.measuring.profile.measure_stages", measured)
    module = nn.Sequential(*(nn.ReLU() for _ in range(5)))
    assert balance_by_time(2, module, torch.rand(2), timeout=0, devices=["cpu", "meta"]) == [4, 1]
    assert balance_by_time(2, module, torch.rand(2), timeout=0, devices=["meta", "cpu"]) == [1, 4]


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


def test_wrong_uses_are_refused():
    two, trained = nn.Sequential(nn.ReLU(), nn.ReLU()), nn.Sequential(nn.Linear(1, 1))
    trained(torch.rand(1, 1)).sum().backward()
    for balance, arguments, options, error, message in [
        (
            balance_by_time,
            (2, two),
            {"device": "cpu", "devices": ["cpu"] * 2},
            ValueError,
            "either device=.* or devices=",
        ),
        (balance_by_time, (2, two), {"devices": ["cpu"]}, IndexError, r"too few devices .*devices: 1, partitions: 2"),
        (balance_by_time, (2, two), {"devices": "cpu"}, TypeError, "must be a list with the device of each partition"),
        (balance_by_time, (1, trained), {}, ValueError, r"already has gradient: '0\.weight'; call zero_grad"),
        (balance_by_time, (two, 2), {}, TypeError, "module must be nn.Sequential to be partitioned, got int"),
        (balance_by_size, (0, two), {}, ValueError, "at least 1, got 0"),
        (balance_by_size, (3, two), {}, ValueError, "cannot make 3 partitions of 2 layers"),
        (balance_by_size, (1, two), {"chunks": 0}, ValueError, "chunks must be at least 1, got 0"),
        (balance_by_size, (1, two), {"param_scale": -1.0}, ValueError, "must not be negative, got -1.0"),
    ]:
        with pytest.raises(error, match=message):
            balance(*arguments, torch.rand(1, 1), **options)


# ---- by size ---------------------------------------------------------------------------------------------------------


def sizes(module, input, monkeypatch, **options):
    """The sizes that balance_by_size finds, in bytes."""
    found = []
    monkeypatch.setattr("pipework.planning.balance.minimax_partition", lambda sizes, partitions: found.extend(sizes))
    balance_by_size(1, module, input, **options)
    return found


@pytest.mark.parametrize(("device", "block"), [("cpu", 1), ("meta", 1), pytest.param(0, 512, marks=pytest.mark.gpu)])
def test_counts_parameters_and_activations(device, block, monkeypatch):
    module = nn.Sequential(nn.Linear(4, 8, bias=False), nn.ReLU(), nn.Linear(8, 2, bias=False))
    # bytes: weights 128 and 64, twice; the batch of 3 saves the input (48) and makes 96, 96 (saved once), 24
    made = [max(block, size) for size in (96, 96, 24)]
    expected = [256 + 48 + made[0], made[1], 128 + made[2]]
    assert sizes(module, torch.zeros(3, 4), monkeypatch, device=device) == expected


def test_scale_chunks_views_and_layers_in_place(monkeypatch):
    def four():
        return nn.Sequential(nn.Linear(4, 4, bias=False))

    views, in_place = [nn.Flatten(), nn.Identity()], [nn.ReLU(inplace=True), nn.ReLU(inplace=True)]
    x = -torch.ones(9, 4)
    for layers, rows, options, expected in [
        (four(), 9, {"chunks": 4, "param_scale": 3}, [192 + 3 * 32]),
        (four(), 2, {"chunks": 8, "param_scale": 0}, [32]),
        (nn.Sequential(*four(), *views), 2, {"param_scale": 0}, [64, 0, 0]),
        (nn.Sequential(*four(), *in_place), 2, {"param_scale": 0}, [64, 0, 0]),
    ]:
        assert sizes(layers, x[:rows], monkeypatch, device="cpu", **options) == expected
    frozen = nn.Sequential(nn.ReLU(inplace=True), *four(), nn.ReLU(inplace=True), four().requires_grad_(False))
    for sample in (x, -torch.ones(1, 4, requires_grad=True)):
        assert sum(balance_by_time(2, frozen, sample, timeout=0)) == 4
        assert (sample == -1).all()  # layers in place run on copies
