"""Several ranks write one checkpoint, and load and fail together."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import TestCase
from unittest.mock import Mock

import pytest
import torch
from torch import nn

from pipework import HostOptimizer, Mesh, Pipe, load_checkpoint, save_checkpoint
from pipework.saving import files, manifest, save
from tests.jobs import runs_on
from tests.saving.harness import Cut, assert_same, make_pipe, model, remembered, snapshot, stir

Run = Callable[..., list[Any]]


def make(mesh: Mesh) -> tuple[Pipe, torch.optim.Optimizer]:
    """A pipe on two ranks, after a step. One process saves the state of the plain optimizer."""
    pipe = Pipe(model(), 4, balance=[4, 4], mesh=mesh, loss_fn=nn.functional.mse_loss, deferred_batch_norm=False)
    optimizer = HostOptimizer(pipe.parameters(), torch.optim.Adam, lr=0.5)
    stir(pipe, optimizer)
    return pipe, optimizer


def state(pipe: Pipe, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {**snapshot(pipe), **remembered(optimizer)}


def save_from_one_process(folder: Path, *steps: int) -> None:
    pipe = make_pipe(Cut(4, "gpipe"))
    optimizer = torch.optim.Adam(pipe.parameters(), lr=0.5)
    for step in steps:
        stir(pipe, optimizer)
        save_checkpoint(folder, pipe, optimizer, step=step)


def load_and_look(mesh: Mesh, folder: str) -> list[str]:
    """The files that a rank has verified."""
    seen: set[str] = set()
    check = manifest.verify_file

    def watched(path: Path, wanted: files.Checksum) -> None:
        seen.add(path.name)
        check(path, wanted)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(manifest, "verify_file", watched)
        load_checkpoint(folder, *make(mesh))
    return sorted(seen)


def test_each_reads_only_what_it_needs(on_ranks: Run, tmp_path: Path) -> None:
    save_from_one_process(tmp_path, 1)
    seen = on_ranks(2, load_and_look, folder=str(tmp_path))
    stages = [{file.split("stage-")[1][:5] for file in names if "stage" in file} for names in seen]
    assert stages == [{"00000"}, {"00002", "00003"}], "stage 1 has no parameters"


def load_damaged(mesh: Mesh, folder: str, file: str, rank: int) -> None:
    pipe, optimizer = make(mesh)
    with TestCase().assertLogs("pipework", "WARNING") as seen:
        found = load_checkpoint(folder, pipe, optimizer)
    assert found is not None
    assert found.step == 1
    (message,) = seen.output
    assert f"{file}: it has 0 bytes" in message
    assert f"(seen by rank {rank})" in message
    other = make(mesh)
    load_checkpoint(f"{folder}/step-00000001", *other)
    assert_same(state(pipe, optimizer), state(*other))


@pytest.mark.parametrize(
    ("file", "rank"), [("model-stage-00003.safetensors", 1), ("optimizer-stage-00000.json", 0), ("training.json", 0)]
)
def test_damage_that_one_sees_turns_all_back(on_ranks: Run, tmp_path: Path, file: str, rank: int) -> None:
    save_from_one_process(tmp_path, 1, 2)
    (tmp_path / "step-00000002" / file).write_bytes(b"")
    on_ranks(2, load_damaged, folder=str(tmp_path), file=file, rank=rank)


def error_of(mesh: Mesh, kind: type[Exception], call: Callable[[], Any]) -> str:
    """The error of rank 1, and on rank 0 that which says so."""
    with pytest.raises(kind if mesh.rank else RuntimeError) as caught:
        call()
    return str(caught.value)


@runs_on(2)
def test_one_that_cannot_write_stops_all(mesh: Mesh, folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pipe, optimizer = make(mesh)
    place = Path(folder)
    save_checkpoint(place, pipe, optimizer, step=1)

    def full(path: Path, tensors: Any, write: Any = save.write_tensors) -> files.Checksum:
        if "stage-00001" in path.name:
            raise OSError(28, "No space left on device")
        return write(path, tensors)

    with monkeypatch.context() as patch:
        patch.setattr(save, "write_tensors", full)
        error = error_of(mesh, OSError, lambda: save_checkpoint(place, pipe, optimizer, step=2))
    assert mesh.rank or error == "rank 1 could not write its stages: OSError: [Errno 28] No space left on device"
    assert mesh.rank or [path.name for path in place.iterdir()] == ["step-00000001"]
    assert save_checkpoint(place, pipe, optimizer, step=2) == place / "step-00000002"


@runs_on(2)
def test_ctrl_c_of_one_stops_all_and_so_does_another_call(mesh: Mesh, folder: str) -> None:
    """The rank that was interrupted may go on with something else, so the other must not wait for it."""
    pipe, optimizer = make(mesh)
    with pytest.MonkeyPatch.context() as patch:
        if mesh.rank == 0:
            patch.setattr(save, "_write", Mock(side_effect=KeyboardInterrupt))
        with pytest.raises((KeyboardInterrupt, RuntimeError)) as caught:
            save_checkpoint(folder, pipe, optimizer, step=1)
    text = "" if mesh.rank == 0 else "rank 0 could not write its stages: KeyboardInterrupt: "
    assert str(caught.value) == text
    x, y = torch.ones(8, 4), torch.ones(8, 2)
    calls = [
        lambda: load_checkpoint(folder, pipe, optimizer),
        lambda: save_checkpoint(folder, pipe, optimizer, step=1),
        lambda: pipe.verify(x, target=y),
    ]
    for first in range(3):
        with pytest.raises(ValueError, match=r"rank \d is to .*, this one to .*: make the same calls on all"):
            calls[(first + mesh.rank) % 3]()
    assert save_checkpoint(folder, pipe, optimizer, step=1).exists()


@runs_on(2)
def test_other_steps_and_other_directories_are_refused(
    mesh: Mesh, folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipe, _ = make(mesh)
    with pytest.raises(ValueError, match=r"the ranks save different steps, \[5, 6\]"):
        save_checkpoint(f"{folder}/run", pipe, step=5 + mesh.rank)
    assert not Path(folder, "run").exists()
    monkeypatch.setattr(files, "_PATIENCE", 0.2)
    error = error_of(mesh, FileNotFoundError, lambda: save_checkpoint(f"{folder}/{mesh.rank}", pipe, step=1))
    assert "must be on a file system that all processes share" in error
    assert mesh.rank or "rank 1 could not write its stages: FileNotFoundError" in error


@runs_on(2)
def test_a_rank_that_cannot_take_over_takes_all_back(mesh: Mesh, folder: str) -> None:
    pipe, optimizer = make(mesh)
    save_checkpoint(folder, pipe, optimizer, step=1)
    stir(pipe, optimizer)
    before = state(pipe, optimizer)

    def refuse(state: Any) -> None:
        raise RuntimeError("no")

    if mesh.rank:
        optimizer.load_state_dict = refuse  # type: ignore[method-assign]
    error = error_of(mesh, RuntimeError, lambda: load_checkpoint(folder, pipe, optimizer))
    assert error == ("no" if mesh.rank else "rank 1 could not take over the state: RuntimeError: no")
    assert_same(state(pipe, optimizer), before)


def save_and_load(mesh: Mesh, folder: str) -> Any:
    """As where the first stage has no parameters, and so no scheduler; and data that the last rank alone reads."""
    pipe, optimizer = make(mesh)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    scheduler.last_epoch = 7
    given = {"scheduler": scheduler, "data_position": [5]} if mesh.rank else {}
    save_checkpoint(folder, pipe, optimizer, step=1, **given)
    scheduler.last_epoch = 0
    found = load_checkpoint(folder, pipe, optimizer, scheduler=scheduler if mesh.rank else None)
    assert found is not None
    assert scheduler.last_epoch == 7 * mesh.rank
    return found.data_position


def test_what_one_alone_was_given(on_ranks: Run, tmp_path: Path) -> None:
    assert on_ranks(2, save_and_load, folder=str(tmp_path)) == [[5], [5]]
    path = tmp_path / "step-00000001"
    assert sorted(file.name for file in path.glob("training*.json")) == ["training-rank-00001.json", "training.json"]
    assert {"scheduler", "data_position"} <= set(json.loads((path / "training-rank-00001.json").read_text()))
    pipe = make_pipe()
    optimizer = torch.optim.Adam(pipe.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    found = load_checkpoint(tmp_path, pipe, optimizer, scheduler=scheduler)
    assert found is not None
    assert (found.data_position, scheduler.last_epoch) == ([5], 7)
