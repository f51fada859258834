"""Files that were damaged after they were written: every one is seen and named, and the checkpoint before is taken."""

import json
import logging
import pickle
import random
import re
import shutil
from pathlib import Path

import pytest
import torch

import pipework
from pipework import load_checkpoint, save_checkpoint
from tests.saving.harness import OPTIMIZERS, assert_same, checksum_of, files_of, make_pipe, remembered, snapshot, stir

# What each file is of: the COMPLETE mark is compared with the manifest, so that an error may name either.
NAMES = [
    "COMPLETE", "manifest.json", "training.json", "training.safetensors",
    *(f"model-stage-0000{stage}.safetensors" for stage in range(2)),
    *(f"optimizer-stage-0000{stage}.{end}" for stage in range(2) for end in ("json", "safetensors")),
]  # fmt: skip


class Saved:
    """Checkpoints of steps 1 and 2, and a pipe to load into."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        pipe = make_pipe()
        optimizer = OPTIMIZERS["adam-tensor-lr"](pipe)
        self.paths, self.states = [], []
        for step in (1, 2):
            stir(pipe, optimizer)
            self.states.append(({**snapshot(pipe)}, remembered(optimizer)))
            self.paths.append(save_checkpoint(directory, pipe, optimizer, step=step))
        self.pipe = make_pipe()
        self.optimizer = OPTIMIZERS["adam-tensor-lr"](self.pipe)

    def load(self, directory: Path | None = None):
        return load_checkpoint(directory or self.directory, self.pipe, self.optimizer)

    def assert_is_of(self, step: int) -> None:
        assert_same(snapshot(self.pipe), self.states[step - 1][0])
        assert_same(remembered(self.optimizer), self.states[step - 1][1])


@pytest.fixture
def saved(tmp_path: Path) -> Saved:
    return Saved(tmp_path / "run")


def assert_falls_back(saved: Saved, caplog: pytest.LogCaptureFixture, *names: str) -> None:
    caplog.clear()
    with caplog.at_level(logging.WARNING, "pipework"):
        found = saved.load()
    assert found.step == 1
    saved.assert_is_of(1)
    (record,) = caplog.records
    assert "step-00000002" in record.getMessage()
    assert any(name in record.getMessage() for name in names), record.getMessage()


def test_the_files(saved):
    assert sorted(path.name for path in files_of(saved.paths[1])) == sorted(NAMES)
    assert saved.load().step == 2
    saved.assert_is_of(2)


@pytest.mark.thorough
def test_two_hundred_flipped_bits(saved, caplog):
    draw = random.Random(0)
    files = files_of(saved.paths[1])
    for number in range(200):
        file = files[number % len(files)] if number < 2 * len(files) else draw.choice(files)
        content = file.read_bytes()
        place = draw.randrange(8 * len(content))
        flipped = bytearray(content)
        flipped[place // 8] ^= 1 << place % 8
        file.write_bytes(flipped)
        also = ["COMPLETE", "manifest.json"] if file.name in ("COMPLETE", "manifest.json") else []
        assert_falls_back(saved, caplog, file.name, *also)
        file.write_bytes(content)
    assert saved.load().step == 2


DAMAGE = {
    "empty": lambda content: b"",
    "shorter": lambda content: content[:-1],
    "longer": lambda content: content + b" ",
    "gone": None,
    "directory": None,
}


@pytest.mark.parametrize("how", DAMAGE)
def test_truncated_and_deleted_files(saved, caplog, how):
    for name in NAMES:
        file = saved.paths[1] / name
        content = file.read_bytes()
        file.unlink()
        if how == "directory":
            file.mkdir()
        elif how != "gone":
            file.write_bytes(DAMAGE[how](content))
        also = ["COMPLETE"] if name == "manifest.json" and how not in ("gone", "directory") else []
        assert_falls_back(saved, caplog, name, *also)
        if how == "directory":
            file.rmdir()
        file.write_bytes(content)
    assert saved.load().step == 2


# Intact files in a wrong place: two files of one kind that are exchanged, and a file of the step before.
STRAY = [
    ("model-stage-00000.safetensors", "model-stage-00001.safetensors", 1),
    ("optimizer-stage-00000.safetensors", "optimizer-stage-00001.safetensors", 1),
    ("optimizer-stage-00000.json", "optimizer-stage-00001.json", 1),
    ("model-stage-00000.safetensors", "optimizer-stage-00000.safetensors", 1),
    *((name, name, 0) for name in NAMES if name != "training.json"),
]


def test_intact_files_in_a_wrong_place(saved, caplog):
    for name, other, step in STRAY:
        file, stray = saved.paths[1] / name, saved.paths[step] / other
        contents = file.read_bytes(), stray.read_bytes()
        if contents[0] == contents[1]:
            assert (step, name) in {(0, f"optimizer-stage-0000{stage}.json") for stage in (0, 1)}
            continue
        file.write_bytes(contents[1])
        if step == 1:
            stray.write_bytes(contents[0])
        assert_falls_back(saved, caplog, name, other, *(["COMPLETE"] if name == "manifest.json" else []))
        file.write_bytes(contents[0])
        stray.write_bytes(contents[1])
    assert saved.load().step == 2


def test_all_of_another_step(saved, caplog):
    """Also where every file is intact: a directory under another's name."""
    shutil.rmtree(saved.paths[1])
    shutil.copytree(saved.paths[0], saved.paths[1])
    assert_falls_back(saved, caplog, "manifest.json: it is of step 1")
    for name in ("manifest.json", "COMPLETE"):
        shutil.copy(saved.paths[0] / name, saved.paths[1] / name)
    assert_falls_back(saved, caplog, "manifest.json: it is of step 1")


def test_all_are_damaged(saved, caplog):
    for path, name in zip(saved.paths, ("model-stage-00001.safetensors", "training.json"), strict=True):
        (path / name).write_bytes(b"")
    before = snapshot(saved.pipe), remembered(saved.optimizer), torch.get_rng_state()
    with pytest.raises(
        OSError, match=r"no checkpoint in .* is intact(?s:.)*step-00000002: training.json: it has 0 bytes"
    ):
        saved.load()
    with pytest.raises(OSError, match=r"step-00000001: model-stage-00001.safetensors: it has 0 bytes, and \d+ were"):
        saved.load(saved.paths[0])
    assert_same(snapshot(saved.pipe), before[0])
    assert_same(remembered(saved.optimizer), before[1])
    assert torch.equal(torch.get_rng_state(), before[2])


def test_what_is_not_needed_is_not_looked_at(saved):
    for file in saved.paths[1].glob("optimizer-*"):
        file.unlink()
    assert load_checkpoint(saved.directory, saved.pipe).step == 2
    assert_same(snapshot(saved.pipe), saved.states[1][0])
    assert saved.load().step == 1


# ---- files that somebody made on purpose -----------------------------------------------------------------------------


class Evil:
    """Makes a file when it is unpickled."""

    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self):
        return Path.touch, (self.canary,)


def sealed_again(path: Path) -> None:
    """Makes the checksums right, as whoever changes files on purpose can."""
    manifest = json.loads((path / "manifest.json").read_bytes())
    for name in manifest["files"]:
        manifest["files"][name] = checksum_of((path / name).read_bytes())._asdict()
    (path / "manifest.json").write_bytes(json.dumps(manifest).encode())
    mark(path)


def mark(path: Path) -> None:
    (path / "COMPLETE").write_bytes(checksum_of((path / "manifest.json").read_bytes()).sha256.encode() + b"\n")


@pytest.mark.parametrize("sealed", [False, True])
@pytest.mark.parametrize("form", ["pickle", "torch.save"])
def test_nothing_is_unpickled(saved, caplog, tmp_path, form, sealed):
    canary = tmp_path / "canary"
    path = saved.paths[1]
    intact = {file: file.read_bytes() for file in files_of(path)}
    for name in NAMES:
        if form == "pickle":
            (path / name).write_bytes(pickle.dumps(Evil(canary)))
        else:
            torch.save(Evil(canary), path / name)
        if sealed and name == "manifest.json":
            mark(path)
        elif sealed and name != "COMPLETE":
            sealed_again(path)
        assert_falls_back(saved, caplog, name, "COMPLETE")
        assert not canary.exists()
        for file, content in intact.items():
            file.write_bytes(content)
    pickle.loads(pickle.dumps(Evil(canary)))
    assert canary.exists(), "the payload would have worked"


NONSENSE = [
    ("training.json", lambda value: []),
    ("training.json", lambda value: {}),
    ("training.json", lambda value: {**value, "data_position": {"$": "Path", "items": []}}),
    ("training.json", lambda value: {**value, "data_position": {"$": "tensor", "name": "../x"}}),
    ("training.json", lambda value: {**value, "data_position": {"$": "dict", "items": [[[], 1]]}}),
    ("training.json", lambda value: {**value, "data_position": {"$": "dict", "items": [1]}}),
    ("optimizer-stage-00001.json", lambda value: []),
    ("optimizer-stage-00001.json", lambda value: {**value, "groups": 3}),
    ("optimizer-stage-00001.json", lambda value: {**value, "state": {"7.weight": 5}}),
    ("optimizer-stage-00001.json", lambda value: {**value, "state": []}),
    ("manifest.json", lambda value: {}),
    ("manifest.json", lambda value: {**value, "format": "other"}),
    ("manifest.json", lambda value: {**value, "version": "1"}),
    ("manifest.json", lambda value: {**value, "stages": 1}),
    ("manifest.json", lambda value: {**value, "replicas": 2}),
    ("manifest.json", lambda value: {**value, "replicas": 0}),
    ("manifest.json", lambda value: {**value, "files": {}}),
    ("manifest.json", lambda value: {**value, "files": {"training.json": 1}}),
]


def test_nonsense_with_right_checksums(saved, caplog):
    path = saved.paths[1]
    intact = {file: file.read_bytes() for file in files_of(path)}
    for name, change in NONSENSE:
        file = path / name
        file.write_bytes(json.dumps(change(json.loads(file.read_bytes()))).encode())
        if name == "manifest.json":
            mark(path)
        else:
            sealed_again(path)
        assert_falls_back(saved, caplog, name, *(["training.safetensors"] if name == "training.json" else []))
        for file, content in intact.items():
            file.write_bytes(content)


def test_a_manifest_that_says_nothing_of_replicas(saved):
    """As versions before there were random states of replicas wrote it."""
    file = saved.paths[1] / "manifest.json"
    value = json.loads(file.read_bytes())
    del value["replicas"]
    file.write_bytes(json.dumps(value).encode())
    mark(saved.paths[1])
    assert saved.load().step == 2


def test_deep_json(saved, caplog):
    (saved.paths[1] / "training.json").write_bytes(b"[" * 100_000)
    sealed_again(saved.paths[1])
    assert_falls_back(saved, caplog, "training.json")


def test_a_newer_format_is_no_damage(saved):
    file = saved.paths[1] / "manifest.json"
    file.write_bytes(json.dumps({**json.loads(file.read_bytes()), "version": 3}).encode())
    mark(saved.paths[1])
    with pytest.raises(ValueError, match=r"the checkpoint has format 3, .* knows formats up to 2: install a newer"):
        saved.load()


def test_the_room_unpickles_nothing():
    for file in (Path(pipework.__file__).parent / "saving").glob("*.py"):
        code = file.read_text(encoding="utf-8")
        found = re.search(
            r"pickle|marshal|shelve|torch\.load\(|torch\.save\(|\beval\(|\bexec\(|allow_pickle|import_string", code
        )
        assert found is None, f"{file.name}: {found}"
