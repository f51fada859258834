"""What may be chosen: which devices in which order, how many stages a worker holds, and schedules by name."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice, permutations
from typing import TYPE_CHECKING, NamedTuple

from pipework.schedule import SCHEDULES
from pipework.schedule.placement import loop_placement, wave_placement

if TYPE_CHECKING:
    from pipework.planning.request import PlanRequest

_ORDERS = 24  # of unequal devices, at most
_FEW = 8  # devices, of which a part may be enough
_MOST_STAGES = 4  # of a worker


class Shape(NamedTuple):
    """How stages lie on workers.

    Attributes:
        stages_per_worker: how many each worker holds.
        placement: the worker of each stage.
        schedules: the names of those that have this placement.
    """

    stages_per_worker: int
    placement: tuple[int, ...]
    schedules: tuple[str, ...]


def shapes(workers: int, layers: int, allowed: Sequence[str] | None = None) -> list[Shape]:
    """The ways in which stages may lie on some workers, if each stage has a layer.

    Args:
        workers: their number.
        layers: their number.
        allowed: names of schedules; None: all.

    Example:
        >>> [(shape.stages_per_worker, shape.placement) for shape in shapes(2, 4)]
        [(1, (0, 1)), (2, (0, 1, 0, 1)), (2, (0, 1, 1, 0))]
    """
    found: dict[tuple[int, ...], list[str]] = {}
    for name, spec in SCHEDULES.items():
        if name in ("fill-drain", "forward-only") or (allowed is not None and name not in allowed):
            continue
        for each in range(1, _MOST_STAGES + 1) if spec.several else (spec.stages_per_worker,):
            if each * workers > layers or (each % 2 and spec.placement is wave_placement):
                continue
            if spec.several and each == 1 and spec.placement is loop_placement and workers > 1:
                continue  # schedules of one stage are there by their own names
            placement = spec.placement(workers, each)
            found.setdefault(placement, []).append(name)
    return [
        Shape(len(placement) // workers, placement, tuple(names))
        for placement, names in sorted(found.items(), key=lambda item: (len(item[0]), item[0]))
    ]


def orders(request: PlanRequest) -> list[tuple[int, ...]]:
    """Orders of the devices, as indices: the given one first, then others; also without the slowest.

    Devices of one kind with one limit are alike. Of many unequal ones, those in order of speed and of memory are taken,
    and some more.
    """
    kinds, limits = request.kinds, request.limits
    given = tuple(range(len(kinds)))
    if request.keeps_order:
        return [given]
    # With larger micro-batches another kind of device may be the fastest; those in the middle decide.
    sums = request.sums(request.chunks[len(request.chunks) // 2])
    speed = {kind: sum(sums.layer_seconds(kind)) for kind in set(kinds)}
    found: dict[tuple[tuple[str, float], ...], tuple[int, ...]] = {}

    def take(order: Sequence[int]) -> None:
        found.setdefault(tuple((kinds[i], limits[i]) for i in order), tuple(order))

    by_speed = sorted(given, key=lambda i: (speed[kinds[i]], -limits[i]))
    for count in range(len(given), 0, -1):
        if count < len(given) and speed[kinds[by_speed[count]]] == speed[kinds[by_speed[0]]]:
            break  # all that are left are alike
        fastest = [i for i in given if i in by_speed[:count]]
        take(fastest)
        for key in (lambda i: speed[kinds[i]], lambda i: limits[i]):
            take(sorted(fastest, key=key))
            take(sorted(fastest, key=key, reverse=True))
        for order in islice(_distinct(fastest, [(kinds[i], limits[i]) for i in given]), _ORDERS):
            take(order)
    return list(found.values())


def fewer(request: PlanRequest) -> list[tuple[int, ...]]:
    """Half of a few equal devices, a quarter and so on: messages may cost more than they save."""
    alike = {*zip(request.kinds, request.limits, strict=True)}
    count, found = len(request.devices), list[tuple[int, ...]]()
    if count > _FEW or len(alike) > 1 or request.keeps_order:
        return found
    while count > 1:
        count = -(-count // 2)
        found.append(tuple(range(count)))
    return found


def _distinct(indices: Sequence[int], alike: Sequence[object]) -> Iterator[tuple[int, ...]]:
    """Permutations that differ in more than devices which are alike."""
    seen = set()
    for order in islice(permutations(indices), 5000):
        key = tuple(alike[i] for i in order)
        if key not in seen:
            seen.add(key)
            yield order
