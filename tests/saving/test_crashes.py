"""A crash, an error or a full disk at any write of a save: what was complete stays so, and nothing is ever mixed.

In one process, so that every single call can be tried: from the failing call on, nothing reaches the disk any more,
and of what was not waited for with fsync half is lost, as if the machine had stopped.
"""

import errno
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from pipework import load_checkpoint, save_checkpoint
from tests.saving.harness import OPTIMIZERS, assert_same, make_pipe, remembered, snapshot, stir

CALLS = ("write", "fsync", "rename", "replace", "open", "mkdir", "unlink", "rmdir", "close")


class Stopped(BaseException):
    """The machine stopped."""


class Disk:
    """Counts the calls that change a directory, and lets one fail.

    Args:
        fail_at: the number of the call; None: none.
        dead: whether all calls after it fail, too, and what was not synchronised is lost. Otherwise the call alone is
            an error.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, fail_at: int | None, *, dead: bool) -> None:
        self.calls = 0
        self.fail_at = fail_at
        self.dead = dead
        self.unsafe: dict[int, Path] = {}
        self.stopped = False
        self.real = {name: getattr(os, name) for name in CALLS}
        for name in CALLS:
            monkeypatch.setattr(os, name, self.patched(name))

    def patched(self, name: str) -> Callable[..., object]:
        real = self.real[name]

        def call(*args, **keywords):
            if name == "close":
                self.unsafe.pop(args[0], None) if not self.stopped else None
                return real(*args)
            if name == "write":
                args = (args[0], bytes(args[1])[:3000])  # a short write, as of real disks
            number = self.calls
            self.calls += 1
            if self.stopped or number == self.fail_at:
                if name == "write" and not self.stopped:
                    real(args[0], args[1][: len(args[1]) // 2])
                if not self.dead:
                    raise OSError(errno.ENOSPC, "No space left on device")
                self.stop()
            result = real(*args, **keywords)
            if name == "open" and args[1] & os.O_CREAT:
                self.unsafe[result] = Path(args[0])
            elif name == "fsync":
                self.unsafe.pop(args[0], None)
            return result

        return call

    def stop(self) -> None:
        if not self.stopped:
            self.stopped = True
            for path in self.unsafe.values():
                if path.exists():
                    os.truncate(path, path.stat().st_size // 2)
        raise Stopped


class Run:
    """A training that costs nothing."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.pipe = make_pipe()
        self.optimizer = OPTIMIZERS["adam"](self.pipe)
        self.states: dict[int, list[dict]] = {}

    def go(self, step: int) -> "Run":
        stir(self.pipe, self.optimizer)
        self.states.setdefault(step, []).append({**snapshot(self.pipe), **remembered(self.optimizer)})
        return self

    def save(self, directory: Path, step: int, keep: int | None = None) -> Path:
        return save_checkpoint(directory, self.pipe, self.optimizer, step=step, keep=keep)


def loaded(directory: Path) -> tuple[int, dict]:
    torch.manual_seed(5)
    pipe = make_pipe()
    optimizer = OPTIMIZERS["adam"](pipe)
    found = load_checkpoint(directory, pipe, optimizer)
    return (0, {}) if found is None else (found.step, {**snapshot(pipe), **remembered(optimizer)})


def same(actual: dict, expected: dict) -> bool:
    try:
        assert_same(actual, expected)
    except AssertionError:
        return False
    return True


def calls_of(monkeypatch: pytest.MonkeyPatch, directory: Path, copy: Path, save: Callable[[Path], object]) -> int:
    shutil.copytree(directory, copy)
    with monkeypatch.context() as patch:
        disk = Disk(patch, None, dead=False)
        save(copy)
    shutil.rmtree(copy)
    return disk.calls


# What is there already, what is saved, and how many are kept.
SCENARIOS = {
    "the first": ([], 1, None),
    "another": ([1], 2, None),
    "the same again": ([1, 2], 2, None),
    "and the oldest go": ([1, 2, 3], 4, 2),
}


def crash_everywhere(monkeypatch, tmp_path, scenario, dead, chosen: Callable[[int], list[int]]):
    there, step, keep = SCENARIOS[scenario]
    run, base = Run(), tmp_path / "base"
    base.mkdir()
    for each in there:
        run.go(each).save(base, each)
    run.go(step)
    count = calls_of(monkeypatch, base, tmp_path / "copy", lambda place: run.save(place, step, keep))
    assert count > 20
    outcomes = set()
    for number in chosen(count):
        place = tmp_path / str(number)
        shutil.copytree(base, place)
        failed = True
        with monkeypatch.context() as patch:
            Disk(patch, number, dead=dead)
            try:
                run.save(place, step, keep)
                failed = False  # it failed while old ones were removed, which is no error
            except (OSError, Stopped):
                pass
        found, state = loaded(place)
        new = found == step and same(state, run.states[step][-1])
        assert new or (found == max(there, default=0) and (not there or same(state, run.states[found][0]))), number
        assert new or failed, number
        outcomes.add(new)
        later = max(step, *there, 0) + 1
        run.save(place, later, keep)
        found, state = loaded(place)
        assert found == later, number
        assert same(state, run.states[step][-1]), number
        left = {path.name for path in place.iterdir()}
        assert not {name for name in left if not name[5:].isdigit()}, number
        shutil.rmtree(place)
    return outcomes


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "every", [pytest.param(False, marks=pytest.mark.thorough), pytest.param(True, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("dead", [True, False], ids=["stops", "fails"])
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_a_crash_at_any_call(monkeypatch, tmp_path, scenario, dead, every):
    def chosen(count):
        sample = random.Random(f"{scenario} {dead}").sample(range(count), 12)
        return range(count) if every else [*sample, count - 1]

    outcomes = crash_everywhere(monkeypatch, tmp_path, scenario, dead, chosen)
    assert outcomes == {True, False} or not every
