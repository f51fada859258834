"""A schedule that says itself what each stage recomputes, and when: bit by bit as without a pipe."""

import random
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from pipework import Pipe
from pipework.schedule import SCHEDULES, Action, Schedule, build, validate, with_recompute, without_recompute
from pipework.schedule.edges import recomputed
from tests.conftest import WAYS, Way
from tests.exactness.test_schedules_from_csv import CHUNKS, GENERATED, pipe_of, with_long_skips
from tests.exactness.test_skips import WIDTH


def some_recomputed(schedule: Schedule, seed: int) -> Schedule:
    """With the recomputation of drawn micro-batches on drawn stages, some right before the backward, some earlier."""
    draw = random.Random(seed)
    orders = []
    for order in with_recompute(schedule, schedule.micro_batches).orders:
        drawn: list[Action] = []
        for action in order:
            if action.kind == "R":
                if draw.random() < 0.5:
                    continue
                first = 1 + drawn.index(Action("F", *action[1:3]))
                drawn.insert(draw.randint(first, len(drawn)), action)
            else:
                drawn.append(action)
        orders.append(tuple(drawn))
    return replace(schedule, orders=tuple(orders))


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.thorough) for seed in (1, 2))])
@pytest.mark.parametrize("name", GENERATED)
def test_each_stage_recomputes_its_own(name: str, seed: int, assert_trained_alike: Callable[..., None]) -> None:
    schedule = some_recomputed(build(name, workers=2 if SCHEDULES[name].stages_per_worker == 2 else 4, chunks=4), seed)
    assert validate(schedule).ascending
    assert 0 < len(recomputed(schedule)) < schedule.stages * schedule.micro_batches
    plain = with_long_skips()
    pipe = pipe_of(plain, schedule, "except_last")
    assert pipe.checkpoint == "as scheduled"
    assert pipe.schedule().orders == schedule.orders
    batches = [(torch.randn(rows, WIDTH),) for rows in (8, 9, CHUNKS - 2)]
    assert_trained_alike(plain, pipe, batches, way=Way("gpipe", inside=True), evaluate=True)


@pytest.mark.parametrize("checkpoint", ["always", "never"])
def test_a_mode_beside_it_is_refused(checkpoint: str) -> None:
    schedule = with_recompute(build("1f1b", workers=4, chunks=CHUNKS), 1)
    with pytest.raises(ValueError, match=f"checkpoint is '{checkpoint}', but the schedule says itself"):
        pipe_of(with_long_skips(), schedule, checkpoint)
    assert pipe_of(with_long_skips(), without_recompute(schedule), checkpoint).checkpoint == checkpoint


@pytest.mark.one_process("predict runs all stages in one process")
def test_a_prediction_knows_what_is_recomputed() -> None:
    plain, kept = with_long_skips(), []
    for count in (0, CHUNKS):
        schedule = with_recompute(build("gpipe", workers=4, chunks=CHUNKS), count)
        pipe: Pipe = pipe_of(plain, schedule, "except_last" if count else "never")
        kept.append(pipe.predict(torch.randn(8, WIDTH), target=torch.zeros(8), timeout=0).stages[0].activations)
    assert kept[1] < kept[0]


def test_the_loss_may_be_outside_if_all_forwards_come_first(assert_trained_alike: Callable[..., None]) -> None:
    schedule = some_recomputed(build("gpipe", workers=4, chunks=CHUNKS), 5)
    plain = with_long_skips()
    outside = replace(
        schedule, orders=tuple(tuple(sorted(order, key=lambda each: each.kind != "F")) for order in schedule.orders)
    )
    pipe = pipe_of(plain, outside, "except_last")
    assert_trained_alike(plain, pipe, [(torch.randn(8, WIDTH),)], way=WAYS["outside"])
