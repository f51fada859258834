"""The training state of each rank: which states it writes, and from which files it resumes."""

import pytest
import torch

from pipework.backend import ProcessGroupView
from pipework.saving.manifest import Manifest, training_files
from pipework.saving.training import TrainingState, note_on_ranks, sources


def manifest(ranks: int, replicas: int, *written: int) -> Manifest:
    files = {file: None for rank in (*range(0, ranks, ranks // replicas), *written) for file in training_files(rank)}
    return Manifest(1, ranks, replicas, (), files)


def place(worker: int, workers: int, replica: int, replicas: int) -> ProcessGroupView:
    return ProcessGroupView(workers * replica + worker, range(workers * replicas), replica, replicas)


# What was saved: ranks, replicas, and which ranks wrote what differs; who loads it; from which files; the note.
CASES = [
    (manifest(1, 1), place(2, 3, 1, 2), [0], "position of replica 0, and also its random states"),
    (manifest(2, 2), place(1, 2, 1, 2), [1], ""),
    (manifest(2, 2), place(0, 1, 2, 3), [0], "2 replicas with 1 workers, and here are 3 with 1: the data positions, r"),
    (manifest(6, 2), place(2, 3, 1, 2), [3], ""),
    (manifest(6, 2), place(0, 2, 0, 2), [0], ""),
    (manifest(6, 2, 1, 5), place(2, 3, 1, 2), [5, 3], ""),
    (manifest(6, 2, 1, 5), place(1, 3, 1, 2), [3, 5], ""),
    (manifest(6, 2, 1, 5), place(1, 2, 1, 2), [3, 5], "2 replicas with 3 workers, and here are 2 with 2: "),
    (manifest(6, 2, 1, 5), place(1, 3, 2, 3), [1, 0], "2 replicas with 3 workers, and here are 3 with 3: "),
]


@pytest.mark.parametrize(("saved", "group", "expected", "part"), CASES)
def test_the_ranks_whose_files_a_rank_reads_and_what_is_said(saved, group, expected, part):
    assert sources(saved, group) == expected
    note = note_on_ranks(saved, group, same_random=True)
    assert part in note
    assert bool(note) is bool(part)
    own = note_on_ranks(saved, group, same_random=False)
    assert own == note.replace("and also its random states", "and keep their own random states")


def test_only_what_differs_is_written():
    one = {"data_position": {"row": 1}, "scaler": {}, "random": torch.tensor([1, 2])}
    first = TrainingState.of(one)
    assert first.different_from(first.digests).values == {}
    same = TrainingState.of({"data_position": None, "scaler": {}, "random": torch.tensor([1, 2])})
    assert same.different_from(first.digests).values == {}, "a position that was not given is none of its own"
    other = TrainingState.of({**one, "random": torch.tensor([1, 3]), "scheduler": {}}).different_from(first.digests)
    assert list(other.values) == ["random", "scheduler"]
    assert other.all_tensors["random"].tolist() == [1, 3]
    for changed in (torch.tensor([1, 2], dtype=torch.int32), torch.tensor([[1, 2]]), [1, 2]):
        assert list(TrainingState.of({**one, "random": changed}).different_from(first.digests).values) == ["random"]
