import copy
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from pipework import Pipe, Plan, plan
from pipework.planning import Rates, profile
from pipework.planning.plan import WorkerBytes
from pipework.planning.request import memory_bytes
from pipework.schedule.edges import offloaded
from pipework.testing import draw_key, reference_step
from tests.planning.measuring.test_profile import X, Y, layers

OPTIONS: dict[str, Any] = {
    "target": Y, "loss_fn": F.mse_loss, "devices": ["cpu", "cpu"], "timeout": 0, "iterations": 30, "chunks": 4,
}  # fmt: skip


def test_what_a_plan_says_was_measured_and_its_pipe_trains_bit_by_bit_like_the_model() -> None:
    lines: list[str] = []
    module, plain = layers(), layers()
    found = plan(module, X, **OPTIONS, progress=lines.append)
    pipe = Pipe(module, plan=found, loss_fn=F.mse_loss)
    torch.manual_seed(3)
    loss = pipe(X, target=Y)
    loss.backward()
    torch.manual_seed(3)
    expected = reference_step(plain, X, Y, F.mse_loss, found.chunks, draw_key())
    assert torch.equal(loss, expected.loss)
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(module.parameters(), plain.parameters(), strict=True))
    assert any("micro-batches of" in line for line in lines)
    assert any(line.endswith(" steps") and "median of" in line for line in lines)
    predicted = pipe.predict(X, target=Y, timeout=0, optimizer=2.0)
    fixed = [0.0] * found.schedule.workers
    for stage, worker in zip(predicted.stages, found.schedule.placement, strict=True):
        fixed[worker] += stage.total - stage.activations
    assert [worker.fixed for worker in found.workers] == fixed
    assert [worker.activations for worker in found.workers] == list(predicted.simulation.peak_memory)


def test_a_pipe_of_a_plan_that_offloads_trains_bit_by_bit_like_the_model(tmp_path: Path) -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 8)) for _ in range(4)))
    plain, x = copy.deepcopy(model), torch.randn(512, 8)
    rates = Rates(1e9, 1e9, host_bytes_per_second=1e9)
    measured = profile(model, x, target=x, loss_fn=F.mse_loss, rates=rates, rows=[64])
    options: dict[str, Any] = {"devices": ["device"] * 4, "chunks": 8, "schedules": ["1f1b"], "iterations": 20}
    memory = 0.8 * max(worker.total for worker in plan(measured, **options).workers)
    plan(measured, memory=memory, **options).save(tmp_path / "plan.json")
    found = Plan.load(tmp_path / "plan.json")
    assert offloaded(found.schedule)
    pipe = Pipe(model, plan=found, loss_fn=F.mse_loss, devices=["cpu"] * 4)
    pipe(x, target=x).backward()
    reference_step(plain, x, x, F.mse_loss, found.chunks, draw_key())
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(model.parameters(), plain.parameters(), strict=True))


def test_the_plan_is_the_fastest_that_was_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[Plan] = []

    def last_first(plans: list[Plan], *_: Any) -> list[Plan]:
        tried.extend(plans)
        return plans[::-1]

    monkeypatch.setattr("pipework.planning.search._WITHIN", float("inf"))
    monkeypatch.setattr("pipework.planning.measuring.plan_model.by_speed", last_first)
    found = plan(layers(), X, **OPTIONS)
    assert len(tried) == 6
    assert found.schedule == tried[-1].schedule
    assert tried[-1].seconds == found.named[tried[-1].schedule.name]
    assert tried[0].seconds <= min(each.seconds for each in tried[1:])
    assert len({each.schedule.name for each in tried[1:]}) == 5


def test_a_limit_is_met_by_what_was_measured() -> None:
    module = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64)) for _ in range(6)))
    x = torch.randn(256, 64)
    options = {**OPTIONS, "target": x, "chunks": 8}
    free = plan(module, x, **options, schedules=["gpipe"])
    limit = 0.8 * sum(worker.total for worker in free.workers)
    tight = plan(module, x, **options, memory=limit)
    assert all(worker.fits for worker in tight.workers)
    assert sum(worker.total for worker in tight.workers) <= limit
    with pytest.raises(ValueError, match=r"no plan fits|the largest limit|devices together may hold"):
        plan(module, x, **options, memory=limit / 4)


@pytest.mark.parametrize("fits_with_less", [True, False])
def test_a_plan_whose_stages_need_more_than_their_layers_is_not_made_again(
    monkeypatch: pytest.MonkeyPatch, fits_with_less: bool
) -> None:
    made = plan(layers(), X, **OPTIONS)
    limit = 1.05 * max(each.total for each in made.workers)
    limited = replace(made, workers=tuple(replace(each, limit=limit) for each in made.workers))
    limits: list[float] = []

    def planned(request: Any, *_: Any, **__: Any) -> list[Plan]:
        limits.append(request.limits[0])
        if len(limits) > 1 and not fits_with_less:
            raise ValueError("no plan fits: limits that the user has not given")
        return [limited]

    def a_tenth_more(plan: Plan, *_: Any) -> Plan:
        return replace(plan, workers=tuple(WorkerBytes(1.1 * each.total, 0, 0, limit) for each in plan.workers))

    monkeypatch.setattr("pipework.planning.measuring.plan_model.best_plans", planned)
    monkeypatch.setattr("pipework.planning.measuring.plan_model.measured_plan", a_tenth_more)
    totals = [each.total for each in made.workers]
    worst = totals.index(max(totals))  # measured times may have cut the layers in either way
    text = rf"worker {worst} \(cpu\) needs .* and may hold .*; it fits with memory='([^']*)'"
    with pytest.raises(ValueError, match=text) as refused:
        plan(layers(), X, **OPTIONS, memory=2 * limit)  # two workers share the CPU's
    found = re.search(text, str(refused.value))
    assert found
    assert memory_bytes(found[1]) == pytest.approx(2 * 1.1 * max(totals), rel=0.01)
    assert limits == pytest.approx([limit, limit / 1.1, limit / 1.1][: 3 if fits_with_less else 2])


@pytest.mark.parametrize("call", [plan, profile])
@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"target": Y}, r"got target= and no loss_fn=: give both, .*\(here Linear\)"),
        ({"loss_fn": F.mse_loss}, "got loss_fn= and no target=: give both"),
    ],
)
def test_target_and_loss_function_go_together(call: Any, given: dict[str, Any], message: str) -> None:
    schedules = {"schedules": ["gpipe"]} if call is plan else {}
    with pytest.raises(ValueError, match=message):
        call(layers(), X, devices=["cpu", "cpu"], timeout=0, **given, **schedules)


def test_a_last_layer_may_compute_the_loss() -> None:
    class Loss(nn.Module):
        def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
            return F.mse_loss(x, target)

    module = layers().append(Loss())
    found = plan(module, X, **{**OPTIONS, "loss_fn": None})
    Pipe(module, plan=found)(X, target=Y).backward()


def test_without_a_target_the_loss_is_outside() -> None:
    options = {**OPTIONS, "target": None, "loss_fn": None}
    with pytest.raises(ValueError, match=r"plan got no target: .* for a loss outside, schedules=\['gpipe'\]"):
        plan(layers(), X, **options, schedules=["gpipe", "1f1b"])
    module = layers()
    Pipe(module, plan=plan(module, X, **options, schedules=["gpipe"]))(X).sum().backward()
    assert plan(layers(), X, **OPTIONS, batch=64).batch == 64  # of which there is no mini-batch to try
