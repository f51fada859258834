"""Schedules by name, as `Pipe(..., schedule="gpipe")` and the command line ask for them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Final

from pipework.schedule.fill_drain import fill_drain
from pipework.schedule.schedule import Schedule

SCHEDULES: Final[Mapping[str, Callable[[int, int], Schedule]]] = MappingProxyType(
    {
        "gpipe": fill_drain,
        "fill-drain": fill_drain,
    }
)
"""Name to generator, a function of the numbers of workers and of micro-batches."""


def build(name: str, *, workers: int, micro_batches: int) -> Schedule:
    """Make a schedule by its name.

    Args:
        name: a key of :data:`SCHEDULES`.
        workers: number of workers.
        micro_batches: number of micro-batches.

    Raises:
        TypeError: a number is not an int.
        ValueError: no such schedule, or a number less than 1.

    Example:
        >>> build("fill-drain", workers=4, micro_batches=8).name
        'gpipe'
        >>> build("gpip", workers=4, micro_batches=8)
        Traceback (most recent call last):
        ValueError: no schedule is called 'gpip': choose one of 'gpipe', 'fill-drain'
    """
    generator = SCHEDULES.get(name) if isinstance(name, str) else None
    if generator is None:
        raise ValueError(f"no schedule is called {name!r}: choose one of {', '.join(map(repr, SCHEDULES))}")
    return generator(workers, micro_batches)
