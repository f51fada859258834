"""What is to be planned: a profile, devices, limits of memory and what may be chosen; and checks of all that."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from typing import TYPE_CHECKING, Any

from pipework.planning.stages import StageSums
from pipework.schedule import SCHEDULES, forward_only, schedule_spec
from pipework.schedule.argument_checks import checked_tuple, positive_integers

if TYPE_CHECKING:
    from pipework.planning.profiles import Profile

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
        schedules: names that may be chosen; None: all.
        keeps_order: whether worker 0 has the first device, and so on.
        offload: whether activations may go to host memory; None: yes, without a note where its speed is not known.
        host_memory: the bytes that they may take there; infinity: no limit.
    """

    profile: Profile
    devices: tuple[str, ...]
    limits: tuple[float, ...]
    batch: int
    chunks: tuple[int, ...]
    optimizer: float = 2.0
    schedules: tuple[str, ...] | None = None
    keeps_order: bool = False
    offload: bool | None = None
    host_memory: float = inf
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

    @property
    def may_offload(self) -> bool:
        """Whether candidates with activations in host memory are tried: their times must be known."""
        return self.offload is not False and all(self.profile.kinds[kind].host is not None for kind in self.kinds)

    @property
    def sharing(self) -> dict[str, int]:
        """The workers that share the memory of each device; a kind of device stands for devices of their own."""
        count = Counter(self.devices)
        return {name: count[name] if name in self.profile.devices else 1 for name in count}


def make_request(
    profile: Profile,
    devices: Sequence[str],
    memory: float | str | Mapping[str, float | str] | None = None,
    *,
    batch: int | None = None,
    chunks: int | Sequence[int] | None = None,
    optimizer: float = 2.0,
    schedules: Sequence[str] | None = None,
    offload: bool | None = None,
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
        offload: see :class:`PlanRequest`.

    Raises:
        TypeError: a number has a wrong type, or devices or schedules is no list.
        ValueError: there are no devices, more devices than layers, a device or limit is unknown, or a number is out of
            range.
    """
    places = tuple(map(str, checked_tuple("devices", devices, "['cuda:0']")))
    if not places:
        raise ValueError("devices is empty: give one for each worker, such as ['cuda:0', 'cuda:1']")
    kinds = [profile.kind_of(place) for place in places]
    rows = profile.batch if batch is None else batch
    check_options(len(places), len(profile.layers), rows, chunks, optimizer, {*places, *kinds}, memory, offload)
    if chunks is None:
        counts = micro_batch_counts(rows, len(places))
        # Layers may refuse micro-batches that are smaller than those of the profile, which are the smallest that ran.
        least = profile.rows[0]
        counts = tuple(count for count in counts if rows // count >= least) or (max(1, rows // least),)
    else:
        counts = _given_chunks(rows, chunks)
    names = checked_schedules(schedules)
    no_limits = (inf,) * len(places)
    request = PlanRequest(profile, places, no_limits, rows, counts, float(optimizer), names, offload=offload)
    limits = []
    for place, kind in zip(places, kinds, strict=True):
        size: float | str | None = memory.get(place, memory.get(kind)) if isinstance(memory, Mapping) else memory
        size = profile.kinds[kind].memory if size is None else size
        limits.append(inf if size is None else memory_bytes(size, f"memory of {place}") / request.sharing[place])
    return replace(request, limits=tuple(limits))


def checked_schedules(schedules: Any) -> tuple[str, ...] | None:
    """The names of schedules as `SCHEDULES` has them, such as "1f1b" for "1F1B"; None: all.

    Raises:
        TypeError: it is no list of names.
        ValueError: there are none, or one is unknown or has no backwards.

    Example:
        >>> checked_schedules(["1F1B", "ScheduleZBVZeroBubble", "fill-drain"])
        ('1f1b', 'zb-v', 'gpipe')
    """
    if schedules is None:
        return None
    names = checked_tuple("schedules", schedules, "['1f1b']")
    if wrong := [name for name in names if not isinstance(name, str)]:
        raise TypeError(f"schedules has {wrong[0]!r}: wanted names, such as '1f1b'")
    specs = [schedule_spec(name) for name in names]
    if not specs or any(spec.generator is forward_only for spec in specs):
        raise ValueError("schedules is empty, or one of them has no backwards: name those that may train, or give None")
    return tuple(dict.fromkeys(next(name for name, known in SCHEDULES.items() if known == spec) for spec in specs))


def check_options(
    workers: int,
    layers: int,
    rows: int,
    chunks: Any,
    optimizer: Any,
    names: Collection[str],
    memory: Any,
    offload: Any,
) -> None:
    """Refuse what no profile makes right: users who plan a model should not wait for its measurement first.

    Args:
        workers: their number.
        layers: their number.
        rows: of a mini-batch.
        chunks: see :func:`make_request`, like `optimizer` and `memory`.
        optimizer: see there.
        names: of the devices and of their kinds.
        memory: see there.
        offload: see there.

    Raises:
        TypeError: one of them has a wrong type.
        ValueError: more workers than layers, a number is out of range, or a limit is for an unknown device.
    """
    if workers > layers:
        raise ValueError(
            f"there are {workers} devices and {layers} layers: each worker needs a layer, so give at most {layers} "
            "devices, or cut layers finer"
        )
    positive_integers(batch=rows)
    if chunks is not None:
        _given_chunks(rows, chunks)
    if isinstance(optimizer, bool) or not isinstance(optimizer, int | float) or not 0 <= optimizer < inf:
        raise ValueError(
            f"optimizer is {optimizer!r}: wanted a number of at least 0, those that it keeps for each parameter, such "
            "as 2 for Adam, or 0 for a HostOptimizer of accelerators, which keeps them in host memory"
        )
    if not isinstance(offload, bool | None):
        raise TypeError(f"offload is {offload!r}: wanted True, if activations may go to host memory, False or None")
    sizes = memory if isinstance(memory, Mapping) else {None: memory}
    for name, size in sizes.items():
        if name is not None and name not in names:
            known = ", ".join(map(repr, sorted(names)))
            raise ValueError(f"memory names {name!r}, which is none of the devices {known}, nor a kind of them")
        if size is not None:
            memory_bytes(size, "memory" if name is None else f"memory of {name}")


def _given_chunks(rows: int, chunks: Any) -> tuple[int, ...]:
    given = tuple(chunks) if isinstance(chunks, Iterable) and not isinstance(chunks, str) else (chunks,)
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
    if len(found) > _MOST_COUNTS:
        found = [found[round(i * (len(found) - 1) / (_MOST_COUNTS - 1))] for i in range(_MOST_COUNTS)]
    return tuple(found)


def memory_bytes(amount: float | str, what: str = "memory") -> float:
    """An amount in bytes.

    Args:
        amount: a number of bytes, or a text such as "24GiB", "500 MB".
        what: names it in messages.

    Raises:
        TypeError: it is neither a number nor a text.
        ValueError: the text is not understood, or the number is not positive.

    Example:
        >>> memory_bytes("1.5KiB"), memory_bytes("2 GB"), memory_bytes(10)
        (1536.0, 2000000000.0, 10.0)
    """
    if isinstance(amount, bool) or not isinstance(amount, int | float | str):
        raise TypeError(f"{what} is {amount!r}: wanted a number of bytes, or a text such as '24GiB'")
    size = amount
    if isinstance(amount, str):
        match = re.fullmatch(r"([0-9]+(?:\.[0-9]*)?)\s*(?:(?:([kmgt])(i?))?b)?", amount.strip().lower())
        if match is None:
            raise ValueError(f"{what} is {amount!r}: wanted a number and a unit, such as '24GiB', '500MB' or '1024'")
        size = float(match[1]) * (1024 if match[3] else 1000) ** " kmgt".index(match[2] or " ")
    if not 0 < float(size) < inf:
        raise ValueError(f"{what} is {amount!r}: wanted a finite amount above 0")
    return float(size)


def memory_size(size: float) -> str:
    """A text that :func:`memory_bytes` reads: at least as many bytes, in three digits or a few more.

    Example:
        >>> memory_size(1025), memory_size(20 * 2**20), memory_size(12)
        ('1.01KiB', '20MiB', '12B')
    """
    power = min(4, int(math.log2(max(1, size)) // 10))
    return f"{math.ceil(100 * size / 1024**power) / 100:g}{' KMGT'[power].strip()}{'i' * (power > 0)}B"
