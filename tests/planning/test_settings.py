from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from pipework import Pipe, Plan
from pipework.planning.request import make_request
from pipework.schedule import build, spread_evenly, with_recompute_on_stages
from tests.planning.made_profiles import made
from tests.planning.test_search import UNEVEN, named, planned

PROFILE = made(UNEVEN, kept=[40] * 8, transfer=0.01)
TWO = ["device", "device"]


def settings(**options: Any) -> Plan:
    return PROFILE.predict(**{"devices": TWO, "balance": [4, 4], "chunks": 8, **options})


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb-h1"])
def test_costs_are_those_by_which_plans_are_found(schedule: str) -> None:
    plan = settings(balance=[3, 5], schedule=schedule, checkpoint="never")
    found = named(make_request(PROFILE, TWO, chunks=8), [3, 5], schedule)
    assert (plan.seconds, plan.workers) == (found.seconds, found.workers)
    assert plan.certificate.any_bound <= plan.certificate.schedule_bound <= plan.seconds


@pytest.mark.parametrize(
    ("schedule", "balance"),
    [("gpipe", [3, 5]), ("1f1b", [3, 5]), ("zb-v", [2, 2, 2, 2]), ("interleaved-1f1b", [1, 2, 1, 2, 1, 1])],
)
@pytest.mark.parametrize("checkpoint", ["always", "except_last", "never"])
def test_the_schedule_is_that_of_a_pipe(schedule: str, balance: list[int], checkpoint: str) -> None:
    layers = nn.Sequential(*(nn.Linear(2, 2) for _ in range(8)))
    options: dict[str, Any] = {"balance": balance, "schedule": schedule, "checkpoint": checkpoint}
    pipe = Pipe(layers, 8, devices=["cpu", "cpu"], loss_fn=nn.functional.mse_loss, **options)
    predicted = pipe.predict(torch.zeros(8, 2), target=torch.zeros(8, 2), timeout=0).simulation.schedule
    assert settings(**options).schedule == predicted


def test_a_plan_by_hand_is_not_faster_than_one_that_was_searched_for() -> None:
    plan = planned(PROFILE, chunks=8)
    assert plan.seconds <= settings(schedule="1f1b", checkpoint="never").seconds


def test_schedules_of_ones_own() -> None:
    own = with_recompute_on_stages(build("1f1b", workers=2, chunks=8), [spread_evenly(4, 8), frozenset()])
    assert settings(schedule=own).schedule == own
    assert settings(schedule=build("1f1b", workers=2, chunks=8)) == settings(schedule="1f1b")


def test_what_does_not_fit_is_noted(tmp_path: Path) -> None:
    plan = settings(memory=2000, checkpoint="never")
    assert [held.fits for held in plan.workers] == [False, False]
    assert plan.notes[0] == "this does not fit: worker 0 needs 2.84 KiB and may hold 1.95 KiB"
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plan


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"devices": []}, ValueError, "devices is empty"),
        ({"devices": ["gpu"] * 2}, ValueError, "no times for device 'gpu'"),
        ({"balance": 4}, TypeError, "balance is 4"),
        ({"balance": [4.0, 4]}, TypeError, r"balance\[0\] is 4.0, a float"),
        ({"balance": [8, 0]}, ValueError, r"balance\[1\] is 0"),
        ({"balance": [4, 5]}, ValueError, r"balance is \[4, 5\], which sums to 9, and the profile has 8 layers"),
        ({"balance": [2, 2, 4]}, ValueError, "balance has 3 stages for 2 devices: schedule 'gpipe' wants 2$"),
        (
            {"balance": [2, 2, 4], "schedule": "interleaved-1f1b"},
            ValueError,
            "schedule 'interleaved-1f1b' wants 4, or another multiple of the devices",
        ),
        ({"chunks": 9}, ValueError, "chunks is 9, and a mini-batch has 8 rows"),
        ({"chunks": [4, 8]}, TypeError, r"chunks is \[4, 8\], a list"),
        ({"chunks": None}, TypeError, "chunks is None, a NoneType"),
        ({"checkpoint": "some"}, ValueError, "checkpoint is 'some': wanted one of 'always', 'except_last', 'never'"),
        ({"schedule": "1f2b"}, ValueError, "no schedule is called '1f2b'"),
        ({"schedule": "forward-only"}, ValueError, "'forward-only' has no backwards"),
        (
            {"schedule": build("1f1b", workers=3, chunks=8)},
            ValueError,
            r"is for .* = \(3, 3, 8\), and devices=",
        ),
        (
            {"schedule": build("1f1b", workers=2, chunks=4)},
            ValueError,
            r"is for .* = \(2, 2, 4\), and devices=",
        ),
        ({"memory": "24 Gb of it"}, ValueError, "memory is '24 Gb of it'"),
    ],
)
def test_what_does_not_go_together_is_refused(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        settings(**options)
