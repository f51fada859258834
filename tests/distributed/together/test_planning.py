"""All ranks plan together: the first measures the layers, and all get the same plan. They train as a plan says."""

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import pipework
import pipework.planning
from pipework import Mesh, Pipe
from pipework.schedule.edges import recomputed
from pipework.testing import draw_key, reference_step
from tests.distributed.together.alike import other_gradients
from tests.helpers import Pop, Stash
from tests.jobs import runs_on
from tests.planning.made_profiles import made


def layers() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(*(nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 8)) for _ in range(4)))


class Fails(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        raise ArithmeticError("this layer")


@pytest.mark.thorough
@runs_on(2)
def test_all_ranks_get_the_same_plan_and_train_with_it(mesh: Mesh) -> tuple[str, float]:
    torch.set_num_threads(1)
    x, y = torch.randn(16, 8), torch.randn(16, 8)
    options: dict[str, Any] = {"target": y, "loss_fn": F.mse_loss, "mesh": mesh, "iterations": 20, "timeout": 0}
    plan = pipework.plan(layers(), x, memory={"cpu": "1 MiB"}, **options)
    assert [worker.limit for worker in plan.workers] == [2.0**20] * 2
    assert plan.devices == ("cpu", "cpu")
    pipe, plain = Pipe(layers(), plan=plan, mesh=mesh, loss_fn=F.mse_loss), layers()
    assert pipe.schedule().orders == plan.schedule.orders
    loss = pipe(x, target=y)
    loss.backward()
    assert torch.equal(loss, reference_step(plain, x, y, F.mse_loss, plan.chunks, key=0).loss)
    assert other_gradients(pipe, plain) == []
    with pytest.raises(RuntimeError if mesh.worker else ValueError, match="memory names 'gpu'"):
        pipework.plan(layers(), x, memory={"gpu": "2 MiB"}, **options)
    with pytest.raises(RuntimeError if mesh.worker else ValueError, match="chunks is 17, and a mini-batch has 16 rows"):
        pipework.plan(layers(), x, chunks=17, **options)
    with pytest.raises(ValueError, match="leave devices= and workers= out"):
        pipework.plan(layers(), x, devices=["cpu", "cpu"], **options)
    with pytest.raises(ValueError, match="which only the measurement of a model needs"):
        pipework.plan(made([1.0]), **options)
    # What fails on one rank is an error on all.
    with pytest.raises(RuntimeError if mesh.worker else ArithmeticError, match="this layer"):
        pipework.plan(nn.Sequential(*layers(), Fails()), x, **options)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("pipework.planning.measuring.on_ranks.device_kind", lambda device: f"card {mesh.worker}")
        with pytest.raises(ValueError, match="devices of several kinds, card 0, card 1: profile the layers on each"):
            pipework.plan(layers(), x, **options)
    with pytest.raises(RuntimeError if mesh.worker else ValueError, match="limit"):
        pipework.plan(layers(), x, memory=10, **options)
    return replace(plan, notes=()).to_json(), loss.item()


@pytest.mark.thorough
@runs_on(2)
def test_a_plan_with_recomputation_and_a_skip_trains_bit_by_bit_like_the_model(mesh: Mesh) -> None:
    x, y = torch.randn(16, 8), torch.randn(16, 8)
    plain = nn.Sequential(nn.Linear(8, 8), Stash(), *layers(), nn.Dropout(), Pop(), nn.Linear(8, 8))
    rates = pipework.planning.Rates(operations=1e9, bytes_per_second=1e9)
    profile = pipework.planning.profile(plain, x, target=y, loss_fn=F.mse_loss, rates=rates, rows=[4])
    plan = profile.predict(
        devices=["device"] * 2, balance=[2, 2, 2, 3], chunks=4, schedule="interleaved-1f1b", checkpoint="always"
    )
    assert plan.schedule.skips == ((0, 3),)
    assert recomputed(plan.schedule)
    pipe = Pipe(copy.deepcopy(plain), plan=plan, mesh=mesh, loss_fn=F.mse_loss)
    for seed in range(2):
        torch.manual_seed(seed)
        loss = pipe(x, target=y)
        loss.backward()
        torch.manual_seed(seed)
        assert torch.equal(loss, reference_step(plain, x, y, F.mse_loss, plan.chunks, draw_key()).loss)
        assert other_gradients(pipe, plain) == []
