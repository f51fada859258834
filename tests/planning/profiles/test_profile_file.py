import json
from pathlib import Path
from typing import Any

import pytest

from pipework.planning.profiles.profile import Profile
from tests.planning.made_profiles import damaged, made


def test_what_is_written_is_read(tmp_path: Path) -> None:
    profile = made([1.0, 2.0, 0.1], rows=(1, 2, 8), speeds={"a": 1.0, "b": 0.5}, transfer=0.1, memory=2**30)
    profile.save(tmp_path / "profile.json")
    assert Profile.load(tmp_path / "profile.json") == profile
    text = (tmp_path / "profile.json").read_text()
    assert '    ["1", "Linear", 100, 100, 0],\n' in text  # a line for each layer


def test_other_files_are_named(tmp_path: Path) -> None:
    file = tmp_path / "file.json"
    for text, message in {
        "{": "file.json is not JSON",
        "[]": "is no profile: it is no object",
        '{"format": "pipework plan 1"}': "its format is 'pipework plan 1', wanted the format 'pipework profile 1'",
        '{"format": "pipework profile 1"}': "is no whole profile: it has no 'batch'",
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
    with pytest.raises(ValueError, match=f"is no whole profile: it has no '{name}'"):
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
        (["kinds", "device", "memory"], "24GiB", "memory of 'device' have '24GiB'"),
        (["kinds", "device", "joined"], [], "'device' has joined=.*: wanted three numbers"),
        (["devices"], {"cpu": "x"}, "devices of a kind that it does not know: 'cpu': 'x'"),
        (["links"], [["a", "b", 1, 2]], "has a link of 'a', which is none of its kinds: 'device'"),
        (["links"], [["device", "device", -1, 2]], "numbers of the link .* have -1"),
        (["links"], [["device", "device", 1, 0]], "wanted a finite bytes_per_second above 0"),
        (["links"], [["device"]], "not enough values"),
        (["skips"], [[0, 99, [1, 1]]], "which does not go with its layers and rows"),
        (["skips"], [[0, 1, [1]]], "which does not go with its layers and rows"),
    ],
)
def test_a_damaged_file_is_refused(tmp_path: Path, path: list[Any], value: Any, message: str) -> None:
    with pytest.raises(ValueError, match=f"profile.json is no profile: .*{message}"):
        Profile.load(damaged(made([1.0] * 4), tmp_path / "profile.json", path, value))
