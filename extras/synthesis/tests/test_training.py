"""Schedules that were made for given costs and memory train bit by bit as the model without a pipe."""

from collections.abc import Callable
from functools import cache

import pytest

from pipework.schedule import Costs, Schedule, from_csv, from_json, loop_placement, to_csv, to_json, wave_placement
from pipework_synthesis import synthesize
from tests.exactness.test_schedules_from_csv import CHUNKS, assert_trains
from tests.exactness.test_skips import CHECKPOINT_MODES

PLACEMENTS = {
    "linear": loop_placement(4, 1),
    "V": wave_placement(2, 2),
    "loop": loop_placement(2, 2),
    "one worker": loop_placement(1, 4),
}
LONG = Costs(forward=[1.0, 2.0, 1.0, 1.5], input_gradient=1.5, weight_gradient=0.5, transfer=0.1)


@cache
def made(placement: str, limit: float | None) -> Schedule:
    workers = 1 + max(PLACEMENTS[placement])
    limits = None if limit is None else [limit * 4 / workers] * workers
    return synthesize(PLACEMENTS[placement], CHUNKS, LONG, memory_limit=limits, iterations=3).schedule


@pytest.mark.parametrize("checkpoint", CHECKPOINT_MODES)
@pytest.mark.parametrize("limit", [None, 2.0])
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_trains(
    placement: str, limit: float | None, checkpoint: str, assert_trained_alike: Callable[..., None]
) -> None:
    assert_trains(made(placement, limit), checkpoint, assert_trained_alike)


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_trains_when_read_from_a_file(placement: str, assert_trained_alike: Callable[..., None]) -> None:
    schedule = made(placement, 2.0)
    assert from_json(to_json(schedule)) == schedule
    again = from_csv(to_csv(schedule), name="from a file")
    assert again.orders == schedule.orders
    assert_trains(again, "except_last", assert_trained_alike)
