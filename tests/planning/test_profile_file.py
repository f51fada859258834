import json
from pathlib import Path

import pytest

from pipework.planning.profile import Profile
from tests.planning.profiles import made


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
