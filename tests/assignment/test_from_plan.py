"""A pipe of a plan: it trains as without a pipe, bit by bit, and refuses what does not go together."""

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from pipework import Pipe, Plan
from pipework.assignment.from_plan import layer_info
from pipework.planning import Profile, profile
from pipework.planning.search import plan_profile
from pipework.schedule.edges import recomputed
from tests.conftest import Way, distance
from tests.helpers import Pop, Stash
from tests.model.parts.quantised import LINEARS
from tests.planning.made_profiles import made

WIDTH, ROWS = 8, 16
INSIDE = Way("gpipe", inside=True)


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    inner = (nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Dropout(0.2), nn.Linear(WIDTH, 4 * WIDTH), nn.GELU())
    return nn.Sequential(*inner, nn.Linear(4 * WIDTH, WIDTH), nn.Linear(WIDTH, 1), nn.Tanh())


@pytest.fixture
def measured() -> Profile:
    """A profile of `layers()` for two kinds of device, neither of which is here."""
    found = made([1, 1, 1, 3, 2, 3, 1, 1], batch=ROWS, speeds={"fast": 4.0, "slow": 1.0}, kept=[1000] * 8)
    return replace(found, layers=tuple(layer_info(str(n), layer) for n, layer in enumerate(layers())))


def planned(
    measured: Profile,
    devices: Sequence[str] = ("fast", "fast"),
    memory: str | None = None,
    schedules: Sequence[str] | None = None,
) -> Plan:
    return plan_profile(
        measured, devices, memory, chunks=4, schedules=schedules, iterations=20, progress=lambda _: None
    )


def trained_alike(plan: Plan, assert_trained_alike: Callable[..., None]) -> None:
    plain = layers()
    pipe = Pipe(copy.deepcopy(plain), plan=plan, loss_fn=distance, devices=["cpu"] * len(plan.devices))
    assert (pipe.chunks, pipe.balance) == (plan.chunks, list(plan.balance))
    assert pipe.checkpoint == "as scheduled"
    assert pipe.schedule().orders == plan.schedule.orders
    batches = [(torch.randn(rows, WIDTH),) for rows in (ROWS, ROWS - 3)]
    assert_trained_alike(plain, pipe, batches, way=INSIDE, evaluate=True)


@pytest.mark.parametrize(
    ("schedules", "devices"),
    [(None, ("fast", "fast")), (["interleaved-1f1b"], ("fast", "fast")), (None, ("slow", "fast", "fast"))],
)
def test_it_trains_as_without_a_pipe(
    measured: Profile,
    schedules: Sequence[str] | None,
    devices: Sequence[str],
    tmp_path: Path,
    assert_trained_alike: Callable[..., None],
) -> None:
    plan = planned(measured, devices, schedules=schedules)
    plan.save(tmp_path / "plan.json")
    trained_alike(Plan.load(tmp_path / "plan.json"), assert_trained_alike)


def test_with_recomputation(measured: Profile, assert_trained_alike: Callable[..., None]) -> None:
    free = planned(measured, schedules=["gpipe"])
    largest = max(worker.total for worker in free.workers)
    plan = planned(measured, memory=f"{int(0.95 * largest)}", schedules=["gpipe"])
    again = recomputed(plan.schedule)
    assert 0 < len(again) < plan.schedule.stages * plan.chunks
    trained_alike(plan, assert_trained_alike)


@pytest.mark.parametrize("checkpoint", ["never", "always"])
def test_with_a_skip_connection_over_stages(checkpoint: str, assert_trained_alike: Callable[..., None]) -> None:
    plain = nn.Sequential(nn.Linear(WIDTH, WIDTH), Stash(), *layers()[:-2], Pop(), *layers()[-2:])
    x, y = torch.randn(ROWS, WIDTH), torch.randn(ROWS)
    measured = profile(plain, x, target=y, loss_fn=distance, rows=[4], timeout=0)
    settings: dict[str, Any] = {"devices": ["cpu"] * 4, "balance": [2, 2, 2, 5], "chunks": 4}
    plan = measured.predict(**settings, schedule="1f1b", checkpoint=checkpoint)
    assert plan.schedule.skips == ((0, 3),)
    pipe = Pipe(copy.deepcopy(plain), plan=plan, loss_fn=distance)
    assert pipe.schedule().skips == plan.schedule.skips
    assert_trained_alike(plain, pipe, [(x,)], way=INSIDE, evaluate=True)


def test_the_devices_of_the_plan_are_those_of_the_pipe() -> None:
    x, y = torch.randn(ROWS, WIDTH), torch.randn(ROWS)
    here = profile(layers(), x, target=y, loss_fn=distance, devices=["cpu", "cpu"], rows=[4], timeout=0)
    plan = planned(here, ("cpu", "cpu"))
    pipe = Pipe(layers(), plan=plan, loss_fn=distance)
    # What is planned depends on measured times: a worker may have several stages.
    assert [str(device) for device in pipe.devices] == ["cpu"] * plan.schedule.workers
    pipe(x, target=y).backward()


def test_what_does_not_go_together_is_refused(measured: Profile) -> None:
    plan, two = planned(measured), ["cpu", "cpu"]
    beside: dict[str, Any] = {"chunks": 8, "balance": [4, 4], "schedule": "1f1b", "checkpoint": "never", "offload": 2}
    for name, value in beside.items():
        with pytest.raises(
            ValueError, match=f"{name}= is given beside plan=, which decides it: leave {name}= or plan="
        ):
            Pipe(layers(), plan=plan, loss_fn=distance, devices=two, **{name: value})
    with pytest.raises(ValueError, match="devices has 3 entries, and the plan has 2 workers: give one for each"):
        Pipe(layers(), plan=plan, loss_fn=distance, devices=["cpu"] * 3)
    with pytest.raises(ValueError, match=r"kinds of device \(fast\), and names no device of this machine: give 2"):
        Pipe(layers(), plan=plan, loss_fn=distance)
    for wrong in ("plan.json", measured):
        with pytest.raises(TypeError, match="wanted a Plan, as pipework"):
            Pipe(layers(), plan=wrong, loss_fn=distance, devices=two)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"nn\.Sequential"):
        Pipe(nn.Linear(2, 2), plan=plan)  # type: ignore[arg-type]


def test_another_model_is_refused(measured: Profile) -> None:
    plan = planned(measured)

    def refused(module: nn.Sequential, words: str) -> None:
        with pytest.raises(ValueError, match=words):
            Pipe(module, plan=plan, loss_fn=distance, devices=["cpu", "cpu"])

    refused(layers()[:-1], "the plan is for another model: layer 7 was .*, and is None here; plan this model")
    wider = layers()
    wider[0] = nn.Linear(WIDTH, WIDTH, bias=False)
    refused(wider, "for another model: layer 0 was .*weights=288.*, and is .*weights=256")
    other = layers()
    other[1] = nn.ReLU()
    refused(other, "for another model: layer 1 was .*'Tanh'.*, and is .*'ReLU'")
    renamed = nn.Sequential()
    for index, layer in enumerate(layers()):
        renamed.add_module(f"layer{index}", layer)
    refused(renamed, "for another model: layer 0 was .*name='0'.*, and is .*name='layer0'")


def test_frozen_parameters_are_seen() -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    module[0].bias.requires_grad_(False)
    first, second = (layer_info("", layer) for layer in module)
    assert (first.weights, first.trained, first.buffers) == (24, 16, 0)
    assert second.buffers == sum(buffer.nbytes for buffer in module[1].buffers())


def test_scales_beside_the_bytes_of_a_parameter_count_as_its_weights() -> None:
    packed, wrapped = (layer_info("", linear(16, 8)).weights for linear in LINEARS.values())
    assert (packed, wrapped) == (64 + 4 * 16 + 4 * 8, 128 + 4 * 8 + 4 * 8)  # values, a scale for 8 or 16 of them, bias
