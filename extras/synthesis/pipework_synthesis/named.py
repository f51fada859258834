"""The schedules that have a name, for one placement: where a search begins, and what its result must not be behind."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from pipework.schedule import SCHEDULES, Costs, Schedule, build


def named_schedules(
    placement: Sequence[int], micro_batches: int, costs: Costs, *, also_untimed: bool
) -> Iterator[Schedule]:
    """All schedules of this placement that train.

    Args:
        placement: the worker of each stage.
        micro_batches: number of micro-batches.
        costs: of the stages; the schedules whose orders depend on costs are made for them.
        also_untimed: whether these are made for equal costs, too, which sometimes is faster.

    Example:
        >>> [schedule.name for schedule in named_schedules((0, 1), 4, Costs(), also_untimed=False)]
        ['gpipe', '1f1b', 'eager-1f1b', 'interleaved-1f1b', 'looped-bfs', 'zb-h1', 'zb-h2', 'interleaved-zb']
    """
    placement = tuple(placement)
    sizes = Counter(placement)
    if len(set(sizes.values())) > 1:
        return
    count = sizes[0]
    for name, spec in SCHEDULES.items():
        if name in ("fill-drain", "forward-only") or (
            count != spec.stages_per_worker and not spec.any_stages_per_worker
        ):
            continue
        try:
            if spec.placement(len(sizes), count) != placement:
                continue
        except ValueError:  # such as an odd number of stages per worker
            continue
        for made_for in (costs, Costs()) if spec.timed and also_untimed else (costs,):
            yield build(name, workers=len(sizes), chunks=micro_batches, stages_per_worker=count, costs=made_for)
