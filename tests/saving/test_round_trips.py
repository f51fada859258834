"""A training that goes on from a checkpoint gives the bits that it would have given, however it is cut then."""

import itertools
import random

import numpy as np
import pytest
import torch
from torch import nn

from pipework import Pipe, load_checkpoint, save_checkpoint
from tests.saving.harness import CUTS, OPTIMIZERS, Cut, assert_same, make_pipe, remembered, snapshot, train

GRID = list(itertools.product(CUTS, CUTS, OPTIMIZERS))
SAMPLE = random.Random(0).sample(GRID, 24) + [(CUTS[0], CUTS[3], name) for name in OPTIMIZERS]


def assert_goes_on(directory, before, after, kind, *, dtype=torch.float32, steps=2):
    torch.manual_seed(1)
    pipe = make_pipe(before).to(dtype)
    optimizer = OPTIMIZERS[kind](pipe)
    train(pipe, optimizer, steps)
    saved, draws = {**snapshot(pipe), **remembered(optimizer)}, torch.get_rng_state()
    save_checkpoint(directory, pipe, optimizer, step=steps)
    assert_same({**snapshot(pipe), **remembered(optimizer)}, saved)
    assert torch.equal(torch.get_rng_state(), draws)
    expected = train(pipe, optimizer, 2)
    torch.manual_seed(2)  # the other one begins elsewhere
    other = make_pipe(after).to(dtype)
    restored = OPTIMIZERS[kind](other)
    assert load_checkpoint(directory, other, restored).step == steps
    for actual, wanted in zip(train(other, restored, 2), expected, strict=True):
        assert_same(actual, wanted)
    assert_same(remembered(restored), remembered(optimizer))


@pytest.mark.parametrize(("before", "after", "kind"), SAMPLE)
def test_goes_on_as_if_it_had_never_stopped(tmp_path, before, after, kind):
    assert_goes_on(tmp_path, before, after, kind)


OTHERWISE = [  # NAdam and ASGD remember float32 numbers whatever the parameters are, which PyTorch would cast
    *((kind, {"dtype": torch.float64}) for kind in OPTIMIZERS),
    *((kind, {"steps": 0}) for kind in ("momentum", "amsgrad", "groups")),  # nothing is remembered yet
    ("adam", {"dtype": torch.bfloat16}),
]


@pytest.mark.parametrize(("kind", "options"), OTHERWISE)
def test_other_dtypes_and_before_the_first_step(tmp_path, kind, options):
    assert_goes_on(tmp_path, Cut(2, "gpipe"), Cut(3, "1f1b"), kind, **options)


def test_the_rest_of_a_run(tmp_path):
    """Schedulers, the scaler, where the data were, and the generators of Python and numpy."""

    def parts(pipe):
        optimizer = OPTIMIZERS["groups"](pipe)
        first = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=3)
        second = torch.optim.lr_scheduler.MultiStepLR(optimizer, [4, 5])
        scheduler = torch.optim.lr_scheduler.SequentialLR(optimizer, [first, second], [3])
        return optimizer, scheduler, torch.amp.GradScaler("cpu", growth_interval=1)

    pipe = make_pipe()
    optimizer, scheduler, scaler = parts(pipe)
    train(pipe, optimizer, 3, scheduler)
    scaler.scale(torch.ones(()))
    scaler.load_state_dict({**scaler.state_dict(), "scale": 1024.0, "_growth_tracker": 3})
    position = {"epoch": 1, "order": [3, 1, 2], "shard": (1, 4), "seen": {7: torch.arange(3)}}
    save_checkpoint(tmp_path, pipe, optimizer, step=3, scheduler=scheduler, scaler=scaler, data_position=position)
    expected = train(pipe, optimizer, 3, scheduler)
    drawn = (torch.rand(1), random.random(), np.random.rand())

    other = make_pipe(Cut(3, "gpipe"))
    optimizer, again, scaler_again = parts(other)
    found = load_checkpoint(tmp_path, other, optimizer, scheduler=again, scaler=scaler_again)
    assert torch.equal(found.data_position["seen"].pop(7), torch.arange(3))
    assert found.data_position == {"epoch": 1, "order": [3, 1, 2], "shard": (1, 4), "seen": {}}
    assert scaler_again.state_dict() == scaler.state_dict()
    for actual, wanted in zip(train(other, optimizer, 3, again), expected, strict=True):
        assert_same(actual, wanted)
    assert again.state_dict() == scheduler.state_dict()
    assert (torch.rand(1), random.random(), np.random.rand()) == drawn


@pytest.mark.parametrize("after", [1, 2])
def test_shared_parameters_stay_shared(tmp_path, after):
    def tied(stages):
        layers = [nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Linear(6, 1)]
        layers[2].weight = layers[4].weight = layers[0].weight  # the first two in one stage, the third in another
        balance = {1: [6], 2: [3, 3]}[stages]
        return Pipe(
            nn.Sequential(*layers), 2, balance=balance, devices=["cpu"] * stages, loss_fn=nn.functional.mse_loss
        )

    pipe = tied(2)
    optimizer = OPTIMIZERS["adam"](pipe)
    train(pipe, optimizer, 2)
    path = save_checkpoint(tmp_path, pipe, optimizer, step=2)
    other = tied(after)
    restored = OPTIMIZERS["adam"](other)
    load_checkpoint(path, other, restored)
    assert other[0].weight is other[2].weight is other[4].weight
    assert_same(snapshot(other), snapshot(pipe))
    assert_same(remembered(restored), remembered(optimizer))
    sizes = [file.stat().st_size for file in sorted(path.glob("model-*"))]
    assert sizes[0] < 6 * 6 * 4 * 2 + 600, "two names of one tensor in a stage are written once"
    with torch.no_grad():
        pipe[4].weight = nn.Parameter(pipe[4].weight + 1)
    path = save_checkpoint(tmp_path, pipe, step=3)
    before = snapshot(other)
    with pytest.raises(ValueError, match=r"0\.weight and 4\.weight are one tensor in the pipe and differ"):
        load_checkpoint(path, other)
    assert_same(snapshot(other), before)


def test_odd_memory_layouts_and_odd_tensors(tmp_path):
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(3, 5).t())
            self.nothing = nn.Parameter(torch.empty(0, 4))
            self.register_buffer("scalar", torch.tensor(True))
            self.register_buffer("complex", torch.randn(3, dtype=torch.complex64).conj())
            self.register_buffer("view", self.weight.data[1:3])
            self.register_buffer("scratch", torch.zeros(9), persistent=False)
            self.register_buffer("none", None)
            self.register_parameter("a/b", nn.Parameter(torch.randn(1)))

        def forward(self, x):
            return x

    def pipe():
        return Pipe(nn.Sequential(nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last), Odd()), balance=[2])

    first, second = pipe(), pipe()
    optimizers = [torch.optim.Adam(each.parameters(), foreach=False) for each in (first, second)]
    for parameter in first.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizers[0].step()
    path = save_checkpoint(tmp_path, first, optimizers[0], step=1)
    load_checkpoint(path, second, optimizers[1])
    assert_same(snapshot(second), snapshot(first))
    assert "1.scratch" not in path.joinpath("manifest.json").read_text()
    for ours, theirs in zip(second.parameters(), first.parameters(), strict=True):
        for key, value in optimizers[0].state[theirs].items():
            assert optimizers[1].state[ours][key].stride() == value.stride()
            assert torch.equal(optimizers[1].state[ours][key], value)


def test_groups_cut_otherwise(tmp_path):
    """Parameters find their own state in other groups; their options only if these agree."""
    pipe = make_pipe()
    optimizer = torch.optim.Adam(pipe.parameters(), lr=0.5)
    train(pipe, optimizer, 1)
    save_checkpoint(tmp_path, pipe, optimizer, step=1)
    parameters = list(pipe.parameters())
    halves = torch.optim.Adam([{"params": parameters[4:]}, {"params": parameters[:4]}], lr=0.1)
    load_checkpoint(tmp_path, pipe, halves)
    assert [group["lr"] for group in halves.param_groups] == [0.5, 0.5]
    assert torch.equal(halves.state[parameters[0]]["exp_avg"], optimizer.state[parameters[0]]["exp_avg"])
    halves.param_groups[1]["lr"] = 0.2
    save_checkpoint(tmp_path, pipe, halves, step=2)
    with pytest.raises(ValueError, match=r"groups \[0, 1\] of the checkpoint, whose options differ"):
        load_checkpoint(tmp_path, pipe, optimizer)
    assert optimizer.param_groups[0]["lr"] == 0.5
