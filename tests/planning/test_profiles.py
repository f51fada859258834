import copy
import json
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pipework.planning.layer_costs import DeviceKind, LayerSeconds, LinkSpeed
from pipework.planning.profiles import Profile
from tests.planning.made_profiles import damaged, made


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


def test_one_size_is_taken_to_be_proportional() -> None:
    assert made([3.0], rows=(4,)).at(2).seconds["device"][0].forward == 6.0


def test_devices_are_known_by_name_and_by_kind() -> None:
    profile = made([1.0])
    assert profile.kind_of("device") == "device"
    with pytest.raises(ValueError, match=r"no times for device 'cuda:0': it knows 'device'; make a profile on that"):
        profile.kind_of("cuda:0")
    with pytest.raises(ValueError, match="at least 1"):
        profile.at(0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rows": (8, 1)}, r"rows is \[8, 1\]: wanted ascending"),
        ({"rows": ()}, "one of them is empty"),
        ({"rows": (1,)}, "are not 1 rows x 2 layers"),
        ({"devices": {"cuda:0": "unknown"}}, "which are none of its kinds: 'device'"),
    ],
)
def test_what_does_not_fit_together_is_refused(changes: dict[str, object], message: str) -> None:
    profile = made([1.0, 2.0])
    fields = {name: getattr(profile, name) for name in ("batch", "rows", "layers", "bytes", "kinds")}
    with pytest.raises(ValueError, match=message):
        Profile(**{**fields, **changes})


@pytest.mark.parametrize("number", [-1.0, float("nan"), float("inf")])
def test_numbers_are_finite_and_not_negative(number: float) -> None:
    with pytest.raises(ValueError, match="wanted finite numbers of at least 0"):
        made([1.0, number])


def test_copies_and_pickles() -> None:
    profile = made([1.0])
    assert pickle.loads(pickle.dumps(profile)) == profile == copy.deepcopy(profile)


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


def test_links_have_a_finite_speed() -> None:
    with pytest.raises(ValueError, match=r"numbers of the link .* have inf"):
        replace(made([1.0]), links={("device", "device"): LinkSpeed(0.0, float("inf"))})


# Files


def test_what_is_written_is_read(tmp_path: Path) -> None:
    profile = made([1.0, 2.0, 0.1], rows=(1, 2, 8), speeds={"a": 1.0, "b": 0.5}, transfer=0.1, memory=2**30)
    profile.save(tmp_path / "profile.json")
    assert Profile.load(tmp_path / "profile.json") == profile


def test_other_files_are_named(tmp_path: Path) -> None:
    file = tmp_path / "file.json"
    for text, message in {
        "{": "file.json is not JSON",
        "[]": "is no profile: wanted an object of format 'pipework profile 1'",
        '{"format": "pipework plan 1"}': "is no profile: wanted an object of format",
        '{"format": "pipework profile 1"}': "is no profile: it has no 'batch'",
    }.items():
        file.write_text(text)
        with pytest.raises(ValueError, match=message):
            Profile.load(file)


@pytest.mark.parametrize("name", ["layers", "bytes", "kinds", "links", "skips", "rows", "batch", "loss_inside"])
def test_a_missing_field_is_named(tmp_path: Path, name: str) -> None:
    made([1.0]).save(tmp_path / "profile.json")
    fields = json.loads((tmp_path / "profile.json").read_text())
    del fields[name]
    (tmp_path / "profile.json").write_text(json.dumps(fields))
    with pytest.raises(ValueError, match=f"is no profile: it has no '{name}'"):
        Profile.load(tmp_path / "profile.json")


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (["batch"], -1, "batch is -1"),
        (["batch"], "16", "batch is '16', a str"),
        (["rows"], [], "one of them is empty"),
        (["rows"], ["a", "b"], r"rows\[0\] is 'a', a str"),
        (["layers"], [], "one of them is empty"),
        (["layers", 0], ["a"], "LayerInfo.* missing"),
        (["layers", 0, 2], -5, "bytes of the layers have -5"),
        (["bytes", 0, 0, 0], "x", "bytes of the profile have 'x'"),
        (["bytes", 0, 0], [1], "LayerBytes.* missing"),
        (["kinds"], {}, "one of them is empty"),
        (["kinds", "device", "seconds", 0, 0, 0], -1, "seconds of 'device' of the profile have -1"),
        (["kinds", "device", "seconds", 0, 0, 0], float("nan"), "seconds of 'device' of the profile have nan"),
        (["kinds", "device", "seconds", 0, 0, 0], None, "seconds of 'device' of the profile have None"),
        (["kinds", "device", "memory"], "24GiB", "times and memory of 'device' have '24GiB'"),
        (["kinds", "device", "joined"], [], "'device' has joined=.*: wanted three numbers"),
        (["devices"], {"cpu": "x"}, r"kinds \['x'\], which are none of its kinds: 'device'"),
        (["links"], [["a", "b", 1, 2]], r"kinds \['a', 'b'\], which are none of its kinds"),
        (["links"], [["device", "device", -1, 2]], "numbers of the link .* have -1"),
        (["links"], [["device", "device", 1, 0]], "has no bytes_per_second"),
        (["links"], [["device"]], "not enough values"),
        (["skips"], [[0, 99, [1, 1]]], "which does not go with its layers and rows"),
        (["skips"], [[0, 1, [1]]], "which does not go with its layers and rows"),
    ],
)
def test_a_damaged_file_is_refused(tmp_path: Path, path: list[Any], value: Any, message: str) -> None:
    with pytest.raises(ValueError, match=f"profile.json is no profile: .*{message}"):
        Profile.load(damaged(made([1.0] * 4), tmp_path / "profile.json", path, value))
