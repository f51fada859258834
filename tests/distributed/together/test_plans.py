"""A plan that was made beforehand decides cut, schedule and recomputation of a pipe whose workers are processes."""

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import pipework.planning
from pipework import Mesh, Pipe, Plan
from pipework.planning import Rates
from pipework.schedule.edges import recomputed
from pipework.testing import draw_key, reference_step
from tests.distributed.together.alike import Pop, Stash, other_gradients
from tests.jobs import runs_on

X, Y = torch.linspace(-1, 1, 16 * 8).reshape(16, 8), torch.zeros(16, 8)
RATES = {"device": Rates(operations=1e9, bytes_per_second=1e9)}  # so that the plan is the same on all ranks


def layers() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(
        *(nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 8)) for _ in range(4)), nn.Dropout()
    )


def with_a_skip() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 8), Stash(), *layers(), Pop(), nn.Linear(8, 8))


def planned() -> Plan:
    profile = pipework.planning.profile(layers(), X, target=Y, loss_fn=F.mse_loss, rates=RATES, rows=[4])
    options: dict[str, Any] = {"devices": ["device"] * 2, "chunks": 4, "schedules": ["1f1b"], "iterations": 30}
    free = pipework.plan(profile, **options)
    return pipework.plan(profile, **options, memory=max(held.total for held in free.workers) - 1000)


def train_alike(pipe: Pipe, plain: nn.Module, chunks: int) -> None:
    for seed in range(2):
        torch.manual_seed(seed)
        loss = pipe(X, target=Y)
        loss.backward()
        torch.manual_seed(seed)
        expected = reference_step(plain, X, Y, F.mse_loss, chunks, draw_key())
        assert torch.equal(loss, expected.loss)
        assert other_gradients(pipe, plain) == []


@pytest.mark.thorough
@runs_on(2)
def test_it_trains_bit_by_bit_like_the_model(mesh: Mesh) -> None:
    module = layers()
    plain, plan = copy.deepcopy(module), planned()
    assert recomputed(plan.schedule)
    pipe = Pipe(module, plan=plan, mesh=mesh, loss_fn=F.mse_loss)
    assert pipe.schedule().orders == plan.schedule.orders
    train_alike(pipe, plain, plan.chunks)
    skipping = with_a_skip()
    measured = pipework.planning.profile(skipping, X, target=Y, loss_fn=F.mse_loss, rates=RATES, rows=[4])
    settings: dict[str, Any] = {"devices": ["device"] * 2, "balance": [2, 2, 2, 3], "chunks": 4}
    over_stages = measured.predict(**settings, schedule="interleaved-1f1b", checkpoint="always")
    assert over_stages.schedule.skips == ((0, 3),)
    train_alike(Pipe(copy.deepcopy(skipping), plan=over_stages, mesh=mesh, loss_fn=F.mse_loss), skipping, 4)
    with pytest.raises(ValueError, match="devices is for workers that are threads"):
        Pipe(layers(), plan=plan, mesh=mesh, devices=["cpu", "cpu"], loss_fn=F.mse_loss)
