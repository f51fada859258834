"""Schedules by name, as in `Pipe(..., schedule="1f1b")` and on the command line."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from pipework.schedule.argument_checks import positive_integers, unknown_name
from pipework.schedule.costs import Costs, checked_without_skips
from pipework.schedule.generators.controllable_memory import v_half, v_min
from pipework.schedule.generators.dualpipe_v import dualpipe_v
from pipework.schedule.generators.fill_drain import fill_drain, forward_only, looped_bfs
from pipework.schedule.generators.hanayo import hanayo
from pipework.schedule.generators.one_forward_one_backward import (
    eager_1f1b,
    interleaved_1f1b,
    one_forward_one_backward,
)
from pipework.schedule.generators.zero_bubble import interleaved_zb, zb_h1, zb_h2, zb_v
from pipework.schedule.placement import loop_placement, wave_placement
from pipework.schedule.schedule import Schedule


@dataclass(frozen=True)
class ScheduleSpec:
    """How to make a schedule of any size.

    Attributes:
        generator: a function of the numbers of workers and micro-batches; if `any_stages_per_worker`, also of stages
            per worker; if `timed`, also of the keyword argument `costs`.
        stages_per_worker: the default number of stages per worker.
        any_stages_per_worker: whether the caller may choose the number of stages per worker.
        placement: a function from the numbers of workers and of stages per worker to the worker of each stage.
        timed: whether the orders depend on costs.
    """

    generator: Callable[..., Schedule]
    stages_per_worker: int = 1
    any_stages_per_worker: bool = False
    placement: Callable[[int, int], tuple[int, ...]] = loop_placement
    timed: bool = False


SCHEDULES: Final[Mapping[str, ScheduleSpec]] = MappingProxyType(
    {
        "gpipe": ScheduleSpec(fill_drain),
        "fill-drain": ScheduleSpec(fill_drain),
        "1f1b": ScheduleSpec(one_forward_one_backward),
        "eager-1f1b": ScheduleSpec(eager_1f1b),
        "interleaved-1f1b": ScheduleSpec(interleaved_1f1b, 2, any_stages_per_worker=True),
        "looped-bfs": ScheduleSpec(looped_bfs, 2, any_stages_per_worker=True),
        "hanayo": ScheduleSpec(hanayo, 2, any_stages_per_worker=True, placement=wave_placement, timed=True),
        "zb-h1": ScheduleSpec(zb_h1),
        "zb-h2": ScheduleSpec(zb_h2),
        "interleaved-zb": ScheduleSpec(interleaved_zb, 2, any_stages_per_worker=True, timed=True),
        "zb-v": ScheduleSpec(zb_v, 2, placement=wave_placement, timed=True),
        "v-half": ScheduleSpec(v_half, 2, placement=wave_placement, timed=True),
        "v-min": ScheduleSpec(v_min, 2, placement=wave_placement, timed=True),
        "dualpipe-v": ScheduleSpec(dualpipe_v, 2, placement=wave_placement),
        "forward-only": ScheduleSpec(forward_only, any_stages_per_worker=True),
    }
)
"""Name to spec. A schedule of your own needs no name: ``Pipe(..., schedule=ScheduleSpec(my_generator))``."""

# Classes of torch.distributed.pipelining whose names are not those above.
_OF_TORCH: Final[Mapping[str, str]] = MappingProxyType(
    {"interleavedzerobubble": "interleaved-zb", "zbvzerobubble": "zb-v"}
)


def schedule_spec(name: str | ScheduleSpec, schedules: Mapping[str, ScheduleSpec] = SCHEDULES) -> ScheduleSpec:
    """Look up a schedule by its name, or by that of its class in `torch.distributed.pipelining`, ignoring case.

    Args:
        name: a key of ``schedules``, or the name of a class. A spec is returned as it is.
        schedules: name to spec.

    Raises:
        ValueError: no schedule has this name.

    Example:
        >>> schedule_spec("ScheduleInterleaved1F1B") is SCHEDULES["interleaved-1f1b"]
        True
    """
    if isinstance(name, ScheduleSpec):
        return name
    found = None
    if isinstance(name, str):
        plain = {_plain(known): known for known in schedules}
        found = plain.get(_plain(name), _OF_TORCH.get(_plain(name)))
    if found is None or found not in schedules:
        raise ValueError(unknown_name("schedule", name, schedules))
    return schedules[found]


def build(
    name: str | ScheduleSpec,
    *,
    workers: int,
    chunks: int,
    stages_per_worker: int | None = None,
    costs: Costs | Callable[[Sequence[int]], Costs] | None = None,
    schedules: Mapping[str, ScheduleSpec] = SCHEDULES,
) -> Schedule:
    """Make a schedule by its name, or from a spec.

    Args:
        name: a key of ``schedules``, a name that :func:`schedule_spec` understands, or a spec.
        workers: number of workers.
        chunks: number of micro-batches.
        stages_per_worker: None: the default of the spec.
        costs: of each stage; the orders of `timed` specs are made for them. Or a function of the placement that gives
            them, such as :meth:`Costs.placed` of costs of whole shares. None: unit costs.
        schedules: name to spec; ``SCHEDULES | {"mine": ScheduleSpec(my_generator)}`` adds a schedule.

    Raises:
        TypeError: a number is not an int, `costs` is no :class:`Costs`, or the generator returns no schedule.
        ValueError: no schedule has this name, a number is less than 1, the schedule does not support this number of
            stages per worker, or the costs are for another number of stages.

    Example:
        >>> build("fill-drain", workers=4, chunks=8).name
        'gpipe'
        >>> build("zb-v", workers=2, chunks=4, costs=Costs(forward=[1, 2]).placed).stages
        4
        >>> build("zb-v", workers=2, chunks=4, stages_per_worker=3)
        Traceback (most recent call last):
        ValueError: schedule 'zb-v' has stages_per_worker=2, got 3: choose one of \
'interleaved-1f1b', 'looped-bfs', 'hanayo', 'interleaved-zb', 'forward-only'
    """

    def costs_of(placement: Sequence[int]) -> Costs:
        return checked_without_skips(costs(placement) if callable(costs) else costs)

    spec = schedule_spec(name, schedules)
    count = spec.stages_per_worker if stages_per_worker is None else stages_per_worker
    positive_integers(workers=workers, chunks=chunks, stages_per_worker=count)
    if not spec.any_stages_per_worker and count != spec.stages_per_worker:
        others = ", ".join(repr(other) for other, its in schedules.items() if its.any_stages_per_worker)
        raise ValueError(
            f"schedule {name!r} has stages_per_worker={spec.stages_per_worker}, got {count}: choose one of {others}"
        )
    sizes = (workers, chunks, count) if spec.any_stages_per_worker else (workers, chunks)
    # Skips are added to the finished schedule; orders do not depend on them.
    timed = {"costs": costs_of(spec.placement(workers, count))} if spec.timed else {}
    schedule = spec.generator(*sizes, **timed)
    if not isinstance(schedule, Schedule):
        raise TypeError(f"the generator {spec.generator!r} of a spec made {schedule!r}: wanted a Schedule")
    # Refuses sequences for another number of stages.
    costs_of(schedule.placement).spread(schedule.stages)
    return schedule


def _plain(name: str) -> str:
    """The name in lower case, without hyphens, underscores and the prefix of PyTorch's classes."""
    return name.lower().replace("-", "").replace("_", "").removeprefix("schedule")
