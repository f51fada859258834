"""Files that were damaged after they were written: every one is seen and named, and the checkpoint before is taken."""

import io
import json
import logging
import pickle
import random
import shutil
from pathlib import Path

import pytest
import torch

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


class Evil:
    """Makes a file when it is unpickled."""

    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self):
        return Path.touch, (self.canary,)


def flipped(content: bytes) -> bytes:
    """With another bit at a random place."""
    place = random.Random(content).randrange(8 * len(content))
    return content[: place // 8] + bytes([content[place // 8] ^ (1 << place % 8)]) + content[place // 8 + 1 :]


def torch_saved(path: Path) -> bytes:
    file = io.BytesIO()
    torch.save(Evil(path.parents[2] / "canary"), file)
    return file.getvalue()


def other_stage(path: Path) -> bytes:
    name = path.name.replace("-00000", "-x").replace("-00001", "-00000").replace("-x", "-00001")
    return path.with_name(name).read_bytes()


# The new content of a file; None: it is gone.
WAYS = {
    "a flipped bit": lambda path: flipped(path.read_bytes()),
    "empty": lambda path: b"",
    "shorter": lambda path: path.read_bytes()[:-1],
    "longer": lambda path: path.read_bytes() + b" ",
    "gone": lambda path: None,
    "a directory": lambda path: "directory",
    "of another stage": other_stage,
    "of the step before": lambda path: (path.parents[1] / "step-00000001" / path.name).read_bytes(),
    "a pickle": lambda path: pickle.dumps(Evil(path.parents[2] / "canary")),
    "a file of torch.save": torch_saved,
}


@pytest.mark.parametrize(
    ("way", "sealed"), [*((way, False) for way in WAYS), ("a pickle", True), ("a file of torch.save", True)]
)
def test_each_file_that_is_damaged_is_seen(saved, caplog, tmp_path, way, sealed):
    """Also, where checksums were made right on purpose, what could be unpickled; nothing is."""
    path = saved.paths[1]
    intact = {file: file.read_bytes() for file in files_of(path)}
    assert sorted(file.name for file in intact) == sorted(NAMES)
    for file, content in intact.items():
        changed = WAYS[way](file)
        if changed == content:
            continue  # of another stage or step, and the same
        file.unlink()
        if changed == "directory":
            file.mkdir()
        elif changed is not None:
            file.write_bytes(changed)
        if sealed and file.name == "manifest.json":
            mark(path)
        elif sealed and file.name != "COMPLETE":
            sealed_again(path)
        names = ("manifest.json", "COMPLETE") if sealed or file.name in ("manifest.json", "COMPLETE") else ()
        assert_falls_back(saved, caplog, file.name, *names)
        if changed == "directory":
            file.rmdir()
        for each, whole in intact.items():
            each.write_bytes(whole)
    assert not (tmp_path / "canary").exists()
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


# ---- files that somebody made on purpose -----------------------------------------------------------------------------


def sealed_again(path: Path) -> None:
    """Makes the checksums right, as whoever changes files on purpose can."""
    manifest = json.loads((path / "manifest.json").read_bytes())
    for name in manifest["files"]:
        manifest["files"][name] = checksum_of((path / name).read_bytes())._asdict()
    (path / "manifest.json").write_bytes(json.dumps(manifest).encode())
    mark(path)


def mark(path: Path) -> None:
    (path / "COMPLETE").write_bytes(checksum_of((path / "manifest.json").read_bytes()).sha256.encode() + b"\n")


DEEP = "[" * 100_000
NONSENSE = [
    ("training.json", lambda value: DEEP),
    ("training.json", lambda value: []),
    ("training.json", lambda value: {}),
    ("training.json", lambda value: {**value, "data_position": {"$": "Path", "items": []}}),
    ("training.json", lambda value: {**value, "data_position": {"$": "tensor", "name": "../x"}}),
    ("optimizer-stage-00001.json", lambda value: []),
    ("optimizer-stage-00001.json", lambda value: {**value, "groups": 3}),
    ("optimizer-stage-00001.json", lambda value: {**value, "state": {"7.weight": 5}}),
    ("optimizer-stage-00001.json", lambda value: {**value, "state": []}),
    ("manifest.json", lambda value: {}),
    ("manifest.json", lambda value: {**value, "format": "other"}),
    ("manifest.json", lambda value: {**value, "version": "1"}),
    ("manifest.json", lambda value: {**value, "stages": 1}),
    ("manifest.json", lambda value: {**value, "replicas": 2}),
    ("manifest.json", lambda value: {**value, "files": {}}),
    ("manifest.json", lambda value: {**value, "files": {"training.json": 1}}),
]


def test_nonsense_with_right_checksums(saved, caplog):
    path = saved.paths[1]
    intact = {file: file.read_bytes() for file in files_of(path)}
    for name, change in NONSENSE:
        file = path / name
        changed = change(json.loads(file.read_bytes()))
        file.write_bytes((DEEP if changed is DEEP else json.dumps(changed)).encode())
        if name == "manifest.json":
            mark(path)
        else:
            sealed_again(path)
        assert_falls_back(saved, caplog, name, *(["training.safetensors"] if name == "training.json" else []))
        for file, content in intact.items():
            file.write_bytes(content)


def test_an_older_or_a_newer_format_is_no_damage(saved):
    file = saved.paths[1] / "manifest.json"
    value = json.loads(file.read_bytes())
    del value["replicas"]  # as versions before there were random states of replicas wrote it
    file.write_bytes(json.dumps(value).encode())
    mark(saved.paths[1])
    assert saved.load().step == 2
    file.write_bytes(json.dumps({**value, "version": 3}).encode())
    mark(saved.paths[1])
    with pytest.raises(ValueError, match=r"the checkpoint has format 3, .* knows formats up to 2: install a newer"):
        saved.load()
