"""Which schedules benchmarks go through."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from pipework.schedule import SCHEDULES, schedule_spec

TRAINING: Final = tuple(name for name in SCHEDULES if name not in ("forward-only", "fill-drain"))
"""All that train, each under one of its names."""


def stages_per_worker(schedule: str, workers: int, wanted: Iterable[int]) -> list[int]:
    """Those of the wanted numbers of stages per worker that a schedule can have; the usual one if it has no choice."""
    known = schedule_spec(schedule)
    if not known.any_stages_per_worker:
        return [known.stages_per_worker]
    result = []
    for count in wanted:
        try:
            known.placement(workers, count)
        except ValueError:
            continue
        result.append(count)
    return result
