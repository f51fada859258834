"""Schedules by name, as `Pipe(..., schedule="1f1b")` and the command line ask for them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from pipework.schedule.checks import positive_integer
from pipework.schedule.fill_drain import fill_drain
from pipework.schedule.interleaved import interleaved_1f1b
from pipework.schedule.looped_bfs import looped_bfs
from pipework.schedule.one_forward_one_backward import one_forward_one_backward
from pipework.schedule.schedule import Schedule


@dataclass(frozen=True)
class Recipe:
    """How a schedule is made.

    Attributes:
        generator: a function of the numbers of workers and of micro-batches, and if `several` of stages per worker.
        several: whether a worker may hold several stages.
    """

    generator: Callable[..., Schedule]
    several: bool = False

    @property
    def stages_per_worker(self) -> int:
        """How many stages a worker has unless told otherwise."""
        return 2 if self.several else 1


SCHEDULES: Final[Mapping[str, Recipe]] = MappingProxyType(
    {
        "gpipe": Recipe(fill_drain),
        "fill-drain": Recipe(fill_drain),
        "1f1b": Recipe(one_forward_one_backward),
        "interleaved-1f1b": Recipe(interleaved_1f1b, several=True),
        "looped-bfs": Recipe(looped_bfs, several=True),
    }
)
"""Name to recipe."""


def recipe(name: str) -> Recipe:
    """Look a schedule up by its name, or by that of its class in `torch.distributed.pipelining`, in any case.

    Raises:
        ValueError: no such schedule.

    Example:
        >>> recipe("ScheduleInterleaved1F1B") is SCHEDULES["interleaved-1f1b"]
        True
    """
    found = {_plain(known): known for known in SCHEDULES}.get(_plain(name)) if isinstance(name, str) else None
    if found is None:
        raise ValueError(f"no schedule is called {name!r}: choose one of {', '.join(map(repr, SCHEDULES))}")
    return SCHEDULES[found]


def build(name: str, *, workers: int, micro_batches: int, stages_per_worker: int | None = None) -> Schedule:
    """Make a schedule by its name.

    Args:
        name: a key of :data:`SCHEDULES`, or a name that :func:`recipe` understands.
        workers: number of workers.
        micro_batches: number of micro-batches.
        stages_per_worker: None: 2 if the schedule is one of several stages per worker, else 1.

    Raises:
        TypeError: a number is not an int.
        ValueError: no such schedule, a number less than 1, or several stages per worker where one is all there can be.

    Example:
        >>> build("fill-drain", workers=4, micro_batches=8).name
        'gpipe'
        >>> build("gpip", workers=4, micro_batches=8)
        Traceback (most recent call last):
        ValueError: no schedule is called 'gpip': choose one of 'gpipe', 'fill-drain', '1f1b', 'interleaved-1f1b', \
'looped-bfs'
    """
    known = recipe(name)
    count = known.stages_per_worker if stages_per_worker is None else stages_per_worker
    positive_integer("stages_per_worker", count)
    if known.several:
        return known.generator(workers, micro_batches, count)
    if count > 1:
        several = ", ".join(repr(other) for other, its in SCHEDULES.items() if its.several)
        raise ValueError(
            f"schedule {name!r} has one stage per worker, got stages_per_worker={count}: choose one of {several}"
        )
    return known.generator(workers, micro_batches)


def _plain(name: str) -> str:
    """The name without what people write differently."""
    return name.lower().replace("-", "").replace("_", "").removeprefix("schedule")
