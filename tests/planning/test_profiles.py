import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from pipework import Pipe, Plan
from pipework.planning.layer_costs import DeviceKind, LayerSeconds
from pipework.planning.profiles import Profile
from pipework.planning.request import make_request
from pipework.schedule import build, spread_evenly, with_recompute
from tests.planning.made_profiles import damaged, made
from tests.planning.test_search import UNEVEN, named


def test_times_between_sizes_lie_on_a_line() -> None:
    profile = made([1.0, 2.0], rows=(2, 4, 16))
    for rows in (2, 3, 4, 10, 16, 20):
        assert profile.at(rows).seconds["device"][1] == pytest.approx(LayerSeconds(*[2.0 * rows] * 3))
        assert profile.at(rows).bytes[0].kept == 10 * rows


def test_below_the_smallest_size_a_time_does_not_fall_faster_than_the_rows() -> None:
    profile = made([1.0], rows=(4, 8))
    table = ((LayerSeconds(4, 4, 4),), (LayerSeconds(12, 12, 12),))  # the line meets 0 at 2 rows
    kind = replace(profile.kinds["device"], seconds=table)
    assert replace(profile, kinds={"device": kind}).at(1).seconds["device"][0].forward == 1


def test_devices_are_known_by_name_and_by_kind() -> None:
    profile = made([1.0])
    assert profile.kind_of("device") == "device"
    with pytest.raises(ValueError, match=r"no times for device 'cuda:0': it knows 'device'; make a profile on that"):
        profile.kind_of("cuda:0")
    with pytest.raises(ValueError, match="at least 1"):
        profile.at(0)


def test_whether_the_input_is_saved_is_no_number_to_interpolate() -> None:
    profile = made([1.0], rows=(2, 4, 8))
    table = tuple((row[0]._replace(saves_input=saves),) for row, saves in zip(profile.bytes, (0, 1, 1), strict=True))
    saved = replace(profile, bytes=table)
    assert [saved.at(rows).bytes[0].saves_input for rows in (1, 2, 3, 4, 6, 16)] == [0, 0, 1, 1, 1, 1]
    single = replace(made([1.0], rows=(4,)), rows=(4,))
    assert {single.at(rows).bytes[0].saves_input for rows in (1, 2, 4, 64)} == {1}


def test_larger_micro_batches_take_no_less_than_the_largest_that_was_measured() -> None:
    """The larger size was measured in a quiet moment: the line falls."""
    kind = DeviceKind(((LayerSeconds(2.0, 2.0, 2.0),), (LayerSeconds(1.0, 1.0, 1.0),)))
    profile = replace(made([1.0], rows=(4, 8)), kinds={"device": kind}, links={})
    assert profile.at(100).seconds["device"][0] == (1.0, 1.0, 1.0)


# Files


def test_what_is_written_is_read(tmp_path: Path) -> None:
    profile = made([1.0, 2.0, 0.1], rows=(1, 2, 8), speeds={"a": 1.0, "b": 0.5}, transfer=0.1, memory=2**30)
    profile.save(tmp_path / "profile.json")
    assert Profile.load(tmp_path / "profile.json") == profile


def test_other_files_and_missing_fields_are_named(tmp_path: Path) -> None:
    file = tmp_path / "file.json"
    made([1.0]).save(file)
    fields = json.loads(file.read_text())
    texts = {
        "[]": "wanted an object of format 'pipework profile 1'",
        '{"format": "pipework plan 1"}': "wanted an object",
    }
    for name in fields.keys() - {"format"}:
        texts[json.dumps({key: value for key, value in fields.items() if key != name})] = f"it has no '{name}'"
    for text, message in texts.items():
        file.write_text(text)
        with pytest.raises(ValueError, match=f"file.json is no profile: {message}"):
            Profile.load(file)


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (["batch"], -1, "batch is -1"),
        (["rows"], [8, 1], r"rows is \[8, 1\]: wanted ascending"),
        (["rows"], [1], "are not 1 rows x 4 layers"),
        (["rows"], ["a", "b"], r"rows\[0\] is 'a', a str"),
        (["layers"], [], "one of them is empty"),
        (["layers", 0, 2], -5, "bytes of the layers have -5"),
        (["bytes", 0, 0, 0], "x", "bytes of the profile have 'x'"),
        (["bytes", 0, 0], [1], "LayerBytes.* missing"),
        (["kinds"], {}, "one of them is empty"),
        (["kinds", "device", "seconds", 0, 0, 0], -1, "seconds of 'device' of the profile have -1"),
        (["kinds", "device", "seconds", 0, 0, 0], float("nan"), "seconds of 'device' of the profile have nan"),
        (["kinds", "device", "memory"], "24GiB", "memory of 'device' have '24GiB'"),
        (["devices"], {"cpu": "x"}, r"kinds \['x'\], which are none of its kinds: 'device'"),
        (["links"], [["device", "device", 0, float("inf")]], "numbers of the link .* have inf"),
        (["links"], [["device", "device", 1, 0]], "has no bytes_per_second"),
        (["links"], [["device"]], "not enough values"),
        (["skips"], [[0, 99, [1, 1]]], "which does not go with its layers and rows"),
        (["skips"], [[0, 1, [1]]], "which does not go with its layers and rows"),
    ],
)
def test_a_damaged_file_is_refused(tmp_path: Path, path: list[Any], value: Any, message: str) -> None:
    with pytest.raises(ValueError, match=f"profile.json is no profile: .*{message}"):
        Profile.load(damaged(made([1.0] * 4), tmp_path / "profile.json", path, value))


# Settings of one's own


PROFILE = made(UNEVEN, kept=[40] * 8, transfer=0.01)
TWO = ["device", "device"]


def settings(**options: Any) -> Plan:
    return PROFILE.predict(**{"devices": TWO, "balance": [4, 4], "chunks": 8, **options})


@pytest.mark.parametrize("schedule", ["gpipe", "zb-h1"])
def test_costs_are_those_by_which_plans_are_found(schedule: str) -> None:
    plan = settings(balance=[3, 5], schedule=schedule, checkpoint="never")
    found = named(make_request(PROFILE, TWO, chunks=8), [3, 5], schedule)
    assert (plan.seconds, plan.workers) == (found.seconds, found.workers)
    assert plan.bound <= plan.seconds


@pytest.mark.parametrize(
    ("schedule", "balance", "checkpoint"),
    [
        ("gpipe", [3, 5], "except_last"),
        ("1f1b", [3, 5], "always"),
        ("zb-v", [2, 2, 2, 2], "never"),
        ("interleaved-1f1b", [1, 2, 1, 2, 1, 1], "except_last"),
    ],
)
def test_the_schedule_is_that_of_a_pipe(schedule: str, balance: list[int], checkpoint: str) -> None:
    layers = nn.Sequential(*(nn.Linear(2, 2) for _ in range(8)))
    options: dict[str, Any] = {"balance": balance, "schedule": schedule, "checkpoint": checkpoint}
    pipe = Pipe(layers, 8, devices=["cpu", "cpu"], loss_fn=nn.functional.mse_loss, **options)
    predicted = pipe.predict(torch.zeros(8, 2), target=torch.zeros(8, 2), timeout=0).simulation.schedule
    assert settings(**options).schedule == predicted


def test_schedules_of_ones_own() -> None:
    own = with_recompute(build("1f1b", workers=2, chunks=8), [spread_evenly(4, 8), frozenset()])
    assert settings(schedule=own).schedule == own
    assert settings(schedule=build("1f1b", workers=2, chunks=8)) == settings(schedule="1f1b")


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"devices": ["gpu"] * 2}, ValueError, "no times for device 'gpu'"),
        ({"balance": 4}, TypeError, "balance is 4"),
        ({"balance": [8, 0]}, ValueError, r"balance\[1\] is 0"),
        ({"balance": [4, 5]}, ValueError, r"balance is \[4, 5\], and the profile has 8 layers: wanted that sum"),
        ({"balance": [2, 2, 4]}, ValueError, r"'gpipe' is for .* = \(2, 2, 8\), and devices=, balance="),
        ({"balance": [2, 2, 4], "schedule": "interleaved-1f1b"}, ValueError, r"\(2, 2, 8\), .* \(2, 3, 8\)"),
        ({"chunks": [4, 8]}, TypeError, r"chunks is \[4, 8\], a list"),
        ({"checkpoint": "some"}, ValueError, "checkpoint is 'some': wanted one of 'always', 'except_last', 'never'"),
        ({"schedule": "forward-only"}, ValueError, "'forward-only' has no backwards"),
        ({"schedule": build("1f1b", workers=2, chunks=4)}, ValueError, r"is for .* = \(2, 2, 4\), and devices="),
    ],
)
def test_what_does_not_go_together_is_refused(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        settings(**options)
