"""Small profiles, made by hand, and files with an error."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pipework.planning.layer_costs import DeviceKind, LayerBytes, LayerInfo, LayerSeconds, LinkSpeed
from pipework.planning.profiles import Profile


def made(
    forward: Sequence[float],
    *,
    batch: int = 8,
    rows: Sequence[int] = (1, 8),
    speeds: Mapping[str, float] | None = None,
    weights: Sequence[int] | None = None,
    kept: Sequence[int] | None = None,
    transfer: float = 0.0,
    memory: int | None = None,
) -> Profile:
    """Layers whose F takes some seconds for a row, and whose I and W take as long."""
    count = len(forward)
    kinds = speeds or {"device": 1.0}
    weights, kept = weights or [100] * count, kept or [10] * count
    return Profile(
        batch=batch,
        rows=tuple(rows),
        layers=tuple(LayerInfo(str(index), "Linear", each, each, 0) for index, each in enumerate(weights)),
        bytes=tuple(tuple(LayerBytes(2 * n, each * n, 0, 2 * n, each * n, 0) for each in kept) for n in rows),
        kinds={
            name: DeviceKind(
                tuple(tuple(LayerSeconds(*[each * n / speed] * 3) for each in forward) for n in rows), memory
            )
            for name, speed in kinds.items()
        },
        links={(one, other): LinkSpeed(transfer, 1e15) for one in kinds for other in kinds},
    )


def damaged(what: Any, file: Path, path: Sequence[Any], value: Any) -> Path:
    """A file of a profile or plan with another value in a place."""
    what.save(file)
    fields = place = json.loads(file.read_text())
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    file.write_text(json.dumps(fields))
    return file
