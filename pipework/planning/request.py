"""What a plan is asked for: layers, devices, limits, rows; checked before any search."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import TYPE_CHECKING

from pipework.planning.memory_size import memory_bytes
from pipework.planning.stages import StageSums
from pipework.schedule import forward_only, schedule_spec
from pipework.schedule.argument_checks import positive_integers

if TYPE_CHECKING:
    from pipework.planning.profile import Profile

_MOST_COUNTS = 10  # of micro-batches


@dataclass(frozen=True)
class PlanRequest:
    """What is to be planned.

    Attributes:
        profile: of the layers.
        devices: those that may be used, one for each worker; each is a device or a kind of device of the profile.
        limits: the bytes that each of them may hold; infinity: no limit.
        batch: the rows of a mini-batch.
        chunks: the numbers of micro-batches that may be chosen.
        optimizer: the numbers that the optimizer keeps for each trained parameter, such as 2 for Adam.
        schedules: names that may be chosen; None: all, and synthesised ones.
        keeps_order: whether worker 0 has the first device, and so on.
    """

    profile: Profile
    devices: tuple[str, ...]
    limits: tuple[float, ...]
    batch: int
    chunks: tuple[int, ...]
    optimizer: float = 2.0
    schedules: tuple[str, ...] | None = None
    keeps_order: bool = False
    _sums: dict[int, StageSums] = field(default_factory=dict, repr=False, compare=False)

    def sums(self, chunks: int) -> StageSums:
        """Sums over the layers for so many micro-batches, of which the largest counts; kept for the next cut."""
        rows = -(-self.batch // chunks)
        if rows not in self._sums:
            self._sums[rows] = StageSums(self.profile, rows, self.optimizer)
        return self._sums[rows]

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kind of each device."""
        return tuple(map(self.profile.kind_of, self.devices))


def make_request(
    profile: Profile,
    devices: Sequence[str],
    memory: float | str | Mapping[str, float | str] | None = None,
    *,
    batch: int | None = None,
    chunks: int | Sequence[int] | None = None,
    optimizer: float = 2.0,
    schedules: Sequence[str] | None = None,
) -> PlanRequest:
    """Check what is asked for.

    Args:
        profile: of the layers.
        devices: one for each worker: devices of the profile, or kinds of device. A device that stands there several
            times, as "cpu" may, has several workers, and shares its memory evenly among them; a kind that stands there
            several times stands for as many devices, each with its own memory.
        memory: the bytes that each device may hold, or texts such as "24GiB"; one for all, or by device or kind. None:
            what the profile says that a device has.
        batch: rows of a mini-batch; None: the profile's.
        chunks: the number of micro-batches, or several to choose from; None: about as many as there are workers up to
            32 times as many, with at least one row in each.
        optimizer: see :class:`PlanRequest`.
        schedules: see :class:`PlanRequest`.

    Raises:
        TypeError: a number has a wrong type, or devices or schedules is one text.
        ValueError: there are no devices, more devices than layers, a device or limit is unknown, or a number is out of
            range.
    """
    for name, names, example in (("devices", devices, "cuda:0"), ("schedules", schedules, "1f1b")):
        if isinstance(names, str):
            raise TypeError(f"{name} is {names!r}, one text: wanted a list, such as [{example!r}]")
    places = tuple(devices)
    if not places:
        raise ValueError("devices is empty: give one for each worker, such as ['cuda:0', 'cuda:1']")
    rows = profile.batch if batch is None else batch
    positive_integers(batch=rows)
    if isinstance(optimizer, bool) or not isinstance(optimizer, int | float):
        raise TypeError(f"optimizer is {optimizer!r}: wanted how many numbers it keeps for each parameter, such as 2")
    if not 0 <= optimizer < inf:
        raise ValueError(f"optimizer is {optimizer!r}: wanted a number of at least 0, such as 2 for Adam")
    for place in places:
        profile.kind_of(place)
    for name in schedules or ():
        if schedule_spec(name).generator is forward_only:
            raise ValueError(f"schedule {name!r} has no backwards: choose among those that train")
    if schedules is not None and not schedules:
        raise ValueError("schedules is empty: name those that may be chosen, or give None for all")
    limits = _limits(profile, places, memory)
    return PlanRequest(
        profile,
        places,
        limits,
        rows,
        _chunks(rows, len(places), chunks, profile.rows[0]),
        float(optimizer),
        None if schedules is None else tuple(schedules),
    )


def _limits(
    profile: Profile, devices: Sequence[str], memory: float | str | Mapping[str, float | str] | None
) -> tuple[float, ...]:
    count = Counter(devices)
    if isinstance(memory, Mapping):
        known = {*devices, *map(profile.kind_of, devices)}
        if unknown := [name for name in memory if name not in known]:
            raise ValueError(
                f"memory names {unknown[0]!r}, which is none of the devices {', '.join(map(repr, count))}, nor a kind "
                "of them"
            )
    found = []
    for device in devices:
        kind = profile.kind_of(device)
        size: float | str | None = memory.get(device, memory.get(kind)) if isinstance(memory, Mapping) else memory
        if size is None:
            size = profile.kinds[kind].memory
        sharing = count[device] if device in profile.devices else 1
        found.append(inf if size is None else memory_bytes(size, f"memory of {device}") / sharing)
    return tuple(found)


def _chunks(rows: int, workers: int, chunks: int | Sequence[int] | None, least: int) -> tuple[int, ...]:
    """The numbers of micro-batches to try."""
    if chunks is None:
        counts = micro_batch_counts(rows, workers)
        # Layers may refuse micro-batches that are smaller than those of the profile, which are the smallest that ran.
        return tuple(count for count in counts if rows // count >= least) or (max(1, rows // least),)
    given = (chunks,) if isinstance(chunks, int) else tuple(chunks)
    if not given:
        raise ValueError("chunks is empty: give a number of micro-batches, several to choose from, or None")
    for each in given:
        positive_integers(chunks=each)
        if each > rows:
            raise ValueError(f"chunks is {each}, and a mini-batch has {rows} rows: give at most as many chunks as rows")
    return tuple(sorted(set(given)))


def micro_batch_counts(rows: int, workers: int) -> tuple[int, ...]:
    """Numbers of micro-batches worth trying: from one for each worker to 32, those that cut the rows evenly.

    Example:
        >>> micro_batch_counts(48, 4), micro_batch_counts(7, 2)
        ((4, 6, 8, 12, 16, 24, 48), (2, 4, 7))
    """
    most = min(rows, 32 * workers)
    least = min(workers, most)
    found = [count for count in range(least, most + 1) if rows % count == 0]
    if len(found) < 3:  # such as a prime number of rows
        found = sorted({*found, *(1 << power for power in range(most.bit_length()) if least <= 1 << power <= most)})
    return tuple(found if len(found) <= _MOST_COUNTS else _spread(found))


def _spread(numbers: Sequence[int]) -> list[int]:
    return [numbers[round(i * (len(numbers) - 1) / (_MOST_COUNTS - 1))] for i in range(_MOST_COUNTS)]
