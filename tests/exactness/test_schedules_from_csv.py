"""A schedule that was read from CSV trains, with skip connections over several stages: bit by bit as without a pipe."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn

from benchmarks.receive_order import theirs
from pipework import Pipe
from pipework.schedule import Schedule, from_csv
from pipework.skip import Namespace
from pipework.skip.layout import skip_edges
from tests.conftest import WAYS, Way, distance
from tests.exactness.test_skips import WIDTH, Down, Up
from tests.ranks import RankPipe, workers_of

GENERATED = tuple(name for name in WAYS if name != "outside")
CHUNKS = 4
THAT_ASCEND = tuple(kind for kind in theirs.SEVERAL if kind != "ScheduleLoopedBFS")


def with_long_skips() -> nn.Sequential:
    """Eight layers. With two of them in each of four stages, skips go from stage 0 to the stages 2 and 3."""
    outer, inner = Namespace(), Namespace()
    return nn.Sequential(
        Down().isolate(outer),
        Down().isolate(inner),
        nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(inplace=True)),
        nn.LayerNorm(WIDTH),
        Up().isolate(inner),
        nn.Dropout(0.2),
        nn.Linear(WIDTH, WIDTH),
        Up().isolate(outer),
    )


def pipe_of(plain: nn.Sequential, schedule: Schedule, checkpoint: str) -> Pipe:
    return RankPipe(
        copy.deepcopy(plain),
        schedule.micro_batches,
        checkpoint,
        balance=[len(plain) // schedule.stages] * schedule.stages,
        **workers_of(schedule.workers),
        schedule=schedule,
        loss_fn=distance,
    )


def assert_trains(schedule: Schedule, checkpoint: str, assert_trained_alike: Callable[..., None]) -> Pipe:
    """Three steps of an optimizer, with the schedule that was given; and batches of several sizes."""
    plain = with_long_skips()
    pipe = pipe_of(plain, schedule, checkpoint)
    batches = [(torch.randn(rows, WIDTH),) for rows in (8, 9, CHUNKS - 2)]
    assert_trained_alike(plain, pipe, batches, way=Way("gpipe", inside=True))
    ran = [[action for action in order if action.kind != "R"] for order in pipe.schedule().orders]
    assert ran == [list(order) for order in schedule.orders]
    return pipe


def computing(schedule: Schedule) -> Schedule:
    """The schedule without what is done between computations."""
    orders = [[action for action in order if action.kind in "FBIW"] for order in schedule.orders]
    return Schedule(schedule.name, schedule.placement, orders)


@pytest.mark.parametrize("kind", THAT_ASCEND)
def test_each_list_of_pytorchs(kind: str, checkpoint: str, assert_trained_alike: Callable[..., None]) -> None:
    schedule = from_csv(theirs.compute_only(kind, workers=2, chunks=CHUNKS), name=kind)
    assert (schedule.workers, schedule.stages) == (2, 4)
    split = any(action.kind == "I" for order in schedule.orders for action in order)
    assert split == (kind in ("ScheduleInterleavedZeroBubble", "ScheduleZBVZeroBubble", "ScheduleDualPipeV"))
    assert_trains(schedule, checkpoint, assert_trained_alike)
    layers = with_long_skips()
    partitions = [layers[stage : stage + 2] for stage in range(0, len(layers), 2)]
    skips = {(edge.source, to) for edge in skip_edges(partitions) for to in edge.destinations}
    assert skips == {(0, 2), (0, 3)}


@pytest.mark.parametrize("kind", THAT_ASCEND)
def test_each_list_of_pytorchs_with_its_transfers_left_out(
    kind: str, assert_trained_alike: Callable[..., None]
) -> None:
    lowered = from_csv(theirs.compute_comms(kind, workers=2, chunks=CHUNKS), name=kind)
    with pytest.raises(ValueError, match=r"has communication or reduction actions .*, which a pipe adds by itself"):
        pipe_of(with_long_skips(), lowered, "never")
    assert_trains(computing(lowered), "always", assert_trained_alike)


def test_pytorchs_looped_bfs_goes_back_from_the_last_micro_batch_and_is_to_be_ordered(
    checkpoint: str, assert_trained_alike: Callable[..., None]
) -> None:
    descending = from_csv(theirs.compute_only("ScheduleLoopedBFS", workers=2, chunks=CHUNKS), name="looped")
    with pytest.raises(ValueError, match=r"in another order than 0, 1, 2, .*Order them"):
        pipe_of(with_long_skips(), descending, checkpoint)
    orders = [
        [a._replace(micro_batch=CHUNKS - 1 - a.micro_batch) if a.kind == "B" else a for a in order]
        for order in descending.orders
    ]
    assert_trains(Schedule("ordered", descending.placement, orders), checkpoint, assert_trained_alike)
