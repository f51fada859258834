"""Several ranks, each a thread with some of the stages: they write one checkpoint, and load and fail together."""

import json
import logging
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from pipework import load_checkpoint, save_checkpoint
from pipework.saving import files, load, manifest, save
from pipework.saving.stages import stages_of
from tests.saving.harness import Cut, assert_same, make_pipe, remembered, snapshot, stir


class Rank:
    """One of two threads, and the stages of its pipe that it holds.

    Its pipe has all stages, but what is not its own is never to be looked at.
    """

    replica, replicas, shard, everyone, workers = 0, 1, 0, range(2), 2

    def __init__(self, rank: int, texts: list[str], barrier: threading.Barrier) -> None:
        self.rank = self.worker = rank
        self.texts, self.barrier = texts, barrier
        self.place = {"dp": 0}
        self.pipe = make_pipe(Cut(4, "gpipe"))
        whole = stages_of(self.pipe)
        self.stages = {number: whole[number] for number in (2 * rank, 2 * rank + 1)}
        own = [t for tensors in self.stages.values() for t in tensors.values() if isinstance(t, torch.nn.Parameter)]
        self.optimizer = torch.optim.Adam(own, lr=0.5)
        self.done: Any = None

    def all_gather_text(self, text: str) -> list[str]:
        self.texts[self.rank] = text
        self.barrier.wait()
        texts = list(self.texts)
        self.barrier.wait()
        return texts

    def state(self) -> dict[str, torch.Tensor]:
        """What this rank holds, and what its optimizer remembers of it."""
        tensors = {name: t for each in self.stages.values() for name, t in each.items()}
        moments = {f"{name}/exp_avg": self.optimizer.state.get(t, {}).get("exp_avg") for name, t in tensors.items()}
        return {name: t.detach().clone() for name, t in {**tensors, **moments}.items() if t is not None}


class Ranks:
    """All of them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        texts, barrier = [""] * 2, threading.Barrier(2, timeout=60)
        self.ranks = [Rank(number, texts, barrier) for number in range(2)]
        by_pipe = {rank.pipe: rank for rank in self.ranks}
        for module in (save, load):
            monkeypatch.setattr(module, "process_group_of", by_pipe.__getitem__)
            monkeypatch.setattr(module, "stages_of", lambda pipe, **_: by_pipe[pipe].stages)

    def __iter__(self):
        return iter(self.ranks)

    def __getitem__(self, number: int) -> Rank:
        return self.ranks[number]

    def all(self, call: Callable[[Rank], Any]) -> list[Any]:
        """What each returned, or raised."""

        def run(rank: Rank) -> None:
            try:
                rank.done = call(rank)
            except Exception as error:
                rank.done = error
                if isinstance(error, threading.BrokenBarrierError):
                    raise

        threads = [threading.Thread(target=run, args=[rank], name=f"rank {rank.rank}") for rank in self.ranks]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
            assert not thread.is_alive()
        return [rank.done for rank in self.ranks]

    def save(self, directory: Path, step: int = 1, **options: Any) -> list[Any]:
        return self.all(lambda rank: save_checkpoint(directory, rank.pipe, rank.optimizer, step=step, **options))

    def load(self, directory: Path, **options: Any) -> list[Any]:
        return self.all(lambda rank: load_checkpoint(directory, rank.pipe, rank.optimizer, **options))


def one_process(directory: Path, steps_done: tuple[int, ...] = (1,)) -> dict[str, Any]:
    """Saves from a single process; returns the state of each step."""
    pipe = make_pipe(Cut(4, "gpipe"))
    optimizer = torch.optim.Adam(pipe.parameters(), lr=0.5)
    states = {}
    for step in steps_done:
        stir(pipe, optimizer)
        save_checkpoint(directory, pipe, optimizer, step=step, data_position=step)
        moments = {f"{name}/exp_avg": optimizer.state[p]["exp_avg"] for name, p in pipe.named_parameters()}
        states[step] = {**snapshot(pipe), **{name: moment.clone() for name, moment in moments.items()}}
    return states


def stirred(ranks: Ranks) -> None:
    """Gives each rank something to remember."""
    for rank in ranks:
        stir(rank.pipe, rank.optimizer)


def test_each_reads_only_what_it_needs(monkeypatch, tmp_path):
    one_process(tmp_path)
    ranks = Ranks(monkeypatch)
    seen: dict[str, set[str]] = {}
    check = manifest.verify_file

    def watched(path, wanted):
        seen.setdefault(threading.current_thread().name, set()).add(path.name)
        check(path, wanted)

    monkeypatch.setattr(manifest, "verify_file", watched)
    ranks.load(tmp_path)
    numbers = {name: {file.split("stage-")[1][:5] for file in files if "stage" in file} for name, files in seen.items()}
    assert numbers == {"rank 0": {"00000"}, "rank 1": {"00002", "00003"}}, "stage 1 has no parameters"


@pytest.mark.parametrize("file", ["model-stage-00003.safetensors", "optimizer-stage-00000.json", "training.json"])
def test_damage_that_one_sees_turns_all_back(monkeypatch, tmp_path, caplog, file):
    states = one_process(tmp_path, steps_done=(1, 2))
    ranks = Ranks(monkeypatch)
    (tmp_path / "step-00000002" / file).write_bytes(b"")
    with caplog.at_level(logging.WARNING, "pipework"):
        found = ranks.load(tmp_path)
    assert [each.step for each in found] == [1, 1]
    for rank in ranks:
        assert_same(rank.state(), {name: states[1][name] for name in rank.state()})
    assert len(caplog.records) == 2
    assert all(f"{file}: it has 0 bytes" in record.getMessage() for record in caplog.records)
    assert f"(seen by rank {int('3' in file)})" in caplog.records[0].getMessage()


def test_one_that_cannot_write_stops_all(monkeypatch, tmp_path):
    one_process(tmp_path)
    ranks = Ranks(monkeypatch)
    stirred(ranks)

    def full(path, tensors, write=save.write_tensors):
        if "stage-00003" in path.name:
            raise OSError(28, "No space left on device")
        return write(path, tensors)

    with monkeypatch.context() as patch:
        patch.setattr(save, "write_tensors", full)
        first, second = ranks.save(tmp_path, 2)
    assert isinstance(second, OSError)
    assert isinstance(first, RuntimeError)
    assert str(first) == "rank 1 could not write its stages: OSError: [Errno 28] No space left on device"
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]
    assert ranks.save(tmp_path, 2) == [tmp_path / "step-00000002"] * 2


def test_different_steps_are_refused(monkeypatch, tmp_path):
    ranks = Ranks(monkeypatch)
    errors = ranks.all(lambda rank: save_checkpoint(tmp_path / "run", rank.pipe, step=5 + rank.rank))
    assert all("the ranks save different steps, [5, 6]" in str(error) for error in errors)
    assert not (tmp_path / "run").exists()


def test_a_directory_of_ones_own_is_an_error(monkeypatch, tmp_path):
    monkeypatch.setattr(files, "_PATIENCE", 0.2)
    ranks = Ranks(monkeypatch)
    first, second = ranks.all(lambda rank: save_checkpoint(tmp_path / str(rank.rank), rank.pipe, step=1))
    assert isinstance(second, FileNotFoundError)
    assert "must be on a file system that all processes share" in str(second)
    assert "rank 1 could not write its stages: FileNotFoundError" in str(first)


def test_a_rank_that_cannot_take_over_takes_all_back(monkeypatch, tmp_path):
    one_process(tmp_path)
    ranks = Ranks(monkeypatch)
    stirred(ranks)
    before = [{**rank.state(), **remembered(rank.optimizer)} for rank in ranks]

    def refuse(state):
        raise RuntimeError("no")

    ranks[1].optimizer.load_state_dict = refuse
    first, second = ranks.load(tmp_path)
    assert (str(first), str(second)) == ("rank 1 could not take over the state: RuntimeError: no", "no")
    for rank, old in zip(ranks, before, strict=True):
        assert_same({**rank.state(), **remembered(rank.optimizer)}, old)


def test_what_one_alone_was_given(monkeypatch, tmp_path):
    """As where the first stage has no parameters, and so no scheduler; and data that the last rank alone reads."""
    ranks = Ranks(monkeypatch)
    schedulers = [torch.optim.lr_scheduler.StepLR(rank.optimizer, 3) for rank in ranks]
    schedulers[1].last_epoch = 7

    def save_with(rank: Rank) -> Path:
        given = {"scheduler": schedulers[1], "data_position": [5]} if rank.rank else {}
        return save_checkpoint(tmp_path, rank.pipe, rank.optimizer, step=1, **given)

    path = ranks.all(save_with)[0]
    assert sorted(file.name for file in path.glob("training*.json")) == ["training-rank-00001.json", "training.json"]
    assert set(json.loads((path / "training-rank-00001.json").read_text())) == {"scheduler", "data_position"}
    schedulers[1].last_epoch = 0
    found = ranks.all(
        lambda rank: load_checkpoint(
            tmp_path, rank.pipe, rank.optimizer, scheduler=schedulers[1] if rank.rank else None
        )
    )
    assert [each.data_position for each in found] == [[5], [5]]
    assert schedulers[1].last_epoch == 7
    monkeypatch.undo()
    pipe = make_pipe()
    optimizer = torch.optim.Adam(pipe.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    assert load_checkpoint(tmp_path, pipe, optimizer, scheduler=scheduler).data_position == [5]
    assert scheduler.last_epoch == 7
