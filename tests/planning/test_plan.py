from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pipework import Plan
from pipework.planning.layer_costs import LayerInfo
from pipework.schedule import from_csv, without_recompute
from tests.planning.profiles import made
from tests.planning.test_search import planned


@pytest.fixture(scope="module")
def plan() -> Plan:
    return planned(made([1.0] * 8, kept=[100] * 8), memory=2100, chunks=8, schedules=["1f1b"])


def test_the_table_says_what_was_chosen_and_how_far_that_is_from_the_best(plan: Plan) -> None:
    lines = str(plan).splitlines()
    assert lines[0] == "plan: 8 layers on 2 workers, 8 micro-batches of 1 row, schedule '1f1b'"
    assert lines[1].split()[:5] == ["worker", "device", "layers", "busy", "recomputes"]
    assert "0 .. 3" in lines[2]
    assert "of 8" in lines[2]
    assert lines[4].startswith("step ")
    assert "lower bound" in lines[5]
    assert lines[6].startswith("what binds: ")


@pytest.mark.parametrize("ending", ["json", "csv", "svg", "png"])
def test_is_saved_in_several_formats(plan: Plan, tmp_path: Path, ending: str) -> None:
    path = tmp_path / f"plan.{ending}"
    plan.save(path)
    if ending == "json":
        assert Plan.load(path) == plan
    elif ending == "csv":
        assert without_recompute(from_csv(path.read_text())).orders == without_recompute(plan.schedule).orders
    else:
        assert path.read_bytes()[:4] in (b"<svg", b"\x89PNG")


def test_the_time_by_the_profile_is_kept(plan: Plan, tmp_path: Path) -> None:
    assert plan.profile_seconds is None
    assert "this plan takes" not in str(plan)
    replace(plan, profile_seconds=2.0).save(tmp_path / "plan.json")
    loaded = Plan.load(tmp_path / "plan.json")
    assert loaded.profile_seconds == 2.0
    assert str(loaded).splitlines()[-1].endswith("; by the profile, this plan takes 2 s")


def test_other_endings_are_refused(plan: Plan, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"saved as .json, .csv, .svg or .png, not as '.txt'"):
        plan.save(tmp_path / "plan.txt")


@pytest.mark.parametrize(
    ("text", "message"),
    [("{", "is not JSON"), ("[]", "is no plan"), ('{"format": "pipework plan 1"}', "is no whole plan: it has no '")],
)
def test_other_files_are_refused(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "plan.json").write_text(text)
    with pytest.raises(ValueError, match=message):
        Plan.load(tmp_path / "plan.json")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda layers: layers[1:], "the plan is for a model of 8 layers, and this one has 7"),
        (
            lambda layers: [layers[0]._replace(weights=3), *layers[1:]],
            "for another model: layer 0 was Linear '0' of 100",
        ),
        (lambda layers: [*layers[:-1], LayerInfo("7", "ReLU", 100, 100, 0)], "layer 7 was Linear .* and is ReLU"),
    ],
)
def test_another_model_is_refused(plan: Plan, change: Any, message: str) -> None:
    plan.check_model(plan.layers)
    with pytest.raises(ValueError, match=message):
        plan.check_model(change(list(plan.layers)))


def test_estimates_are_marked() -> None:
    profile = made([1.0] * 4)
    kind = replace(profile.kinds["device"], estimated=True)
    assert "s estimated, bubble" in str(planned(replace(profile, kinds={"device": kind})))
