"""What `two_stage_speed` holds its measurements against."""

import pytest

from benchmarks.two_stage_speed.run import ONE_CORE, check, unpipelined, variant
from benchmarks.two_stage_speed.task import Task


def test_who_computes_other_gradients_is_an_error() -> None:
    task = Task(blocks=2, width=8, tokens=2, rows=1, chunks=2)
    model = task.model()
    batch, _ = task.batch()
    variants = {ONE_CORE: unpipelined(task, micro_batched=True), "whole": unpipelined(task, micro_batched=False)}
    check(variants)
    variants["wrong"] = variant(model, lambda: model(batch).sum().backward())
    with pytest.raises(AssertionError, match="other gradients: wrong"):
        check(variants)
