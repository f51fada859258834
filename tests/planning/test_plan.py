import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pipework import Plan
from pipework.schedule import from_csv, without_recompute
from tests.planning.made_profiles import damaged, made
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


def test_is_saved_in_several_formats(plan: Plan, tmp_path: Path) -> None:
    saved, csv, svg = (tmp_path / f"plan.{ending}" for ending in ("json", "csv", "svg"))
    for path in (saved, csv, svg):
        plan.save(path)
    assert Plan.load(saved) == plan
    assert without_recompute(from_csv(csv.read_text())).orders == without_recompute(plan.schedule).orders
    assert svg.read_text().startswith("<svg")


def test_fields_of_plans_that_were_saved_before_are_left_out(plan: Plan, tmp_path: Path) -> None:
    before = {"certificate": {"schedule_bound": 1.0, "any_bound": 1.0, "binding": "memory"}, "profile_seconds": 2.0}
    fields = {**json.loads(plan.to_json()), **before}
    assert Plan.from_json(json.dumps(fields), "plan.json") == plan


def test_other_files_and_endings_are_refused(plan: Plan, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"saved as .json, .csv, .svg, not as '.txt'"):
        plan.save(tmp_path / "plan.txt")
    for content, message in (
        (b"{", "is no plan: Expecting"),
        (plan.to_json()[:400].encode(), "is no plan: "),
        (b"[]", "is no plan: wanted an object of format 'pipework plan 1'"),
        (b'{"format": "pipework plan 1"}', "is no plan: it has no '"),
        (bytes(range(256)), "is no plan: .* codec can't decode"),
        (b"[" * 100_000, "is no plan: maximum recursion depth"),
    ):
        (tmp_path / "plan.json").write_bytes(content)
        with pytest.raises(ValueError, match=f"plan.json {message}"):
            Plan.load(tmp_path / "plan.json")


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (["devices"], [], "the plan has 0 devices, and its other parts are for 2"),
        (["devices"], [0, 1], "devices and notes of the plan: wanted texts"),
        (["balance"], [8], "1 parts of the balance, and its other parts are for 2"),
        (["balance"], [8, 0], r"balance\[1\] is 0"),
        (["chunks"], 3, "3 micro-batches, and its other parts are for 8"),
        (["batch"], "8", "batch is '8', a str"),
        (["layers"], [], "0 layers, and"),
        (["layers", 0], [1], "LayerInfo.* missing"),
        (["workers", 0, "fixed"], -1, "bytes of its workers have -1"),
        (["workers", 0, "limit"], -1, "bytes of its workers have -1"),
        (["costs", "forward"], [1, 2, 3], "Costs: forward has 3 numbers: wanted 2"),
        (["costs", "forward"], [-1, 1], "forward of stage 0 is -1"),
        (["named"], {"1f1b": None}, "times of the plan have None"),
        (["optimizer"], "adam", "numbers of the optimizer have 'adam'"),
        (["named"], {"1f1b": float("nan")}, "times of the plan have nan"),
        (["schedule"], {}, "not a schedule of pipework"),
        (["more"], 1, "unexpected keyword argument 'more'"),
    ],
)
def test_a_damaged_file_is_refused(plan: Plan, tmp_path: Path, path: list[Any], value: Any, message: str) -> None:
    with pytest.raises(ValueError, match=f"plan.json is no plan: .*{message}"):
        Plan.load(damaged(plan, tmp_path / "plan.json", path, value))


def test_estimates_are_marked() -> None:
    profile = made([1.0] * 4)
    kind = replace(profile.kinds["device"], estimated=True)
    assert "s estimated, bubble" in str(planned(replace(profile, kinds={"device": kind})))
