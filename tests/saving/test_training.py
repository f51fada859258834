"""The training state of each rank: which states it writes, and from which files it resumes."""

import logging

import pytest
import torch

from pipework.saving.collective import MeshCoordinate
from pipework.saving.manifest import Manifest, training_files
from pipework.saving.training import TrainingState, notes_on_ranks, sources


def manifest(ranks: int, replicas: int, *written: int) -> Manifest:
    files = {file: None for rank in (*range(0, ranks, ranks // replicas), *written) for file in training_files(rank)}
    return Manifest(1, ranks, replicas, (), files)


@pytest.mark.parametrize(
    ("saved", "coordinate", "expected"),
    [
        (manifest(1, 1), MeshCoordinate(0, 1, 0, 1), [0]),
        (manifest(1, 1), MeshCoordinate(2, 3, 1, 2), [0]),
        (manifest(2, 2), MeshCoordinate(0, 1, 1, 2), [1]),
        (manifest(2, 2), MeshCoordinate(1, 2, 1, 2), [1]),
        (manifest(2, 2), MeshCoordinate(0, 1, 2, 3), [0]),
        (manifest(6, 2), MeshCoordinate(2, 3, 1, 2), [3]),
        (manifest(6, 2, 1, 5), MeshCoordinate(2, 3, 1, 2), [5, 3]),
        (manifest(6, 2, 1, 5), MeshCoordinate(1, 3, 1, 2), [3, 5]),
        (manifest(6, 2, 1, 5), MeshCoordinate(1, 2, 1, 2), [3, 5]),
        (manifest(6, 2, 1, 5), MeshCoordinate(1, 3, 2, 3), [1, 0]),
    ],
)
def test_the_ranks_whose_files_a_rank_reads(saved, coordinate, expected):
    assert sources(saved, coordinate) == expected


@pytest.mark.parametrize(
    ("saved", "coordinate", "same_random", "expected"),
    [
        (manifest(6, 2, 5), MeshCoordinate(0, 3, 0, 2), True, []),
        (manifest(6, 2), MeshCoordinate(0, 2, 0, 2), True, []),
        (
            manifest(6, 2, 1, 5), MeshCoordinate(0, 1, 0, 2), True,
            [(logging.INFO, "its replicas were of 3 processes, and here of 1 process: what was special to ranks 1, 5, "
             "such as random states, gives way to what the first of them had")],
        ),
        (
            manifest(3, 3), MeshCoordinate(0, 1, 0, 1), False,
            [(logging.WARNING, "it is of 3 replicas, and here is 1 replica: the data position and the random states of "
             "replicas 1 to 2 are left out")],
        ),
        (
            manifest(1, 1), MeshCoordinate(0, 1, 0, 2), True,
            [(logging.WARNING, "it is of 1 replica, and here are 2 replicas: the data position of replica 0 goes to "
             "replica 1, too, as do its random states, since the script has given all replicas the same seed")],
        ),
        (
            manifest(2, 1, 1), MeshCoordinate(0, 1, 0, 3), False,
            [
                (logging.WARNING, "it is of 1 replica, and here are 3 replicas: the data position of replica 0 goes to "
                 "replicas 1 to 2, too, whose random states stay what they are, since the script has given them "
                 "different seeds"),
                (logging.INFO, "its replicas were of 2 processes, and here of 1 process: what was special to rank 1, "
                 "such as random states, gives way to what the first of them had"),
            ],
        ),
    ],
)  # fmt: skip
def test_notes_on_another_number_of_ranks(saved, coordinate, same_random, expected):
    assert notes_on_ranks(saved, coordinate, same_random=same_random) == expected


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
