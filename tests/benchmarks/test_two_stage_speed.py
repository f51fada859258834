"""What `two_stage_speed` holds its measurements against."""

import pytest

from benchmarks.two_stage_speed.predictions import Forecast
from benchmarks.two_stage_speed.run import ONE_CORE, check, unpipelined, variant
from benchmarks.two_stage_speed.task import Task


@pytest.mark.parametrize(
    ("schedule", "ideal"), [("gpipe", 9 / 16), ("1f1b", 9 / 16), ("interleaved-1f1b", 17 / 32), ("looped-bfs", 17 / 32)]
)
def test_ideal_is_a_share_of_the_one_core_time(schedule: str, ideal: float) -> None:
    assert Task().ideal(schedule) == pytest.approx(ideal)


def test_who_computes_other_gradients_is_an_error() -> None:
    task = Task(blocks=2, width=8, tokens=2, rows=1, chunks=2)
    model = task.model()
    batch, _ = task.batch()
    variants = {ONE_CORE: unpipelined(task, micro_batched=True), "whole": unpipelined(task, micro_batched=False)}
    check(variants)
    variants["wrong"] = variant(model, lambda: model(batch).sum().backward())
    with pytest.raises(AssertionError, match="other gradients: wrong"):
        check(variants)


def test_predictions_are_compared_with_the_median() -> None:
    each = Forecast(recorded=[1.0, 2.0, 9.0], predicted=2.1, by_step=[1.1, 2.1, 8.0], before=1.5)
    assert each.measured == 2.0
    assert each.off(each.predicted) == pytest.approx(5.0)
    assert each.off(each.before) == pytest.approx(-25.0)
    assert each.off_by_step == pytest.approx(5.0)  # of +10, +5 and -11
