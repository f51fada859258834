"""Plans one size, in a process of its own, since the most memory of a process is asked for: `run.py` starts it."""

from __future__ import annotations

import json
import resource
import sys
import time

from pipework.planning.layer_costs import DeviceKind, LayerBytes, LayerInfo, LayerSeconds, LinkSpeed
from pipework.planning.profiles import Profile
from pipework.planning.search import plan_profile

MIB, GIB = 2**20, 2**30


def profile_of(layers: int, chunks: int) -> Profile:
    """Layers of three sizes in turn, some milliseconds for two rows, with I and W of 1.1 and 0.7 times F."""
    rows = (1, 2)
    return Profile(
        batch=chunks,
        rows=rows,
        layers=tuple(LayerInfo(str(index), "Block", 100 * MIB, 100 * MIB, 0) for index in range(layers)),
        bytes=tuple((LayerBytes(*(each * n * MIB for each in (1, 8, 1, 1, 9, 1))),) * layers for n in rows),
        kinds={
            "device": DeviceKind(
                tuple(tuple(_seconds(n * (1 + 0.3 * (index % 3))) for index in range(layers)) for n in rows),
                memory=80 * GIB,
                estimated=True,
            )
        },
        links={("device", "device"): LinkSpeed(1e-5, 1e11)},
    )


def _seconds(milliseconds: float) -> LayerSeconds:
    return LayerSeconds(*(1e-3 * milliseconds * share for share in (1.0, 1.1, 0.7)))


def main(workers: int, chunks: int, seconds: float) -> None:
    """Prints what the plan is and what it took, as JSON."""
    begin, lines = time.perf_counter(), list[str]()
    profile = profile_of(2 * workers + 2, chunks)
    plan = plan_profile(profile, ["device"] * workers, chunks=chunks, seconds=seconds, progress=lines.append)
    result = {
        "workers": workers, "chunks": chunks, "layers": len(profile.layers), "budget": seconds,
        "seconds": time.perf_counter() - begin,
        "gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / GIB,
        "schedule": plan.schedule.name, "stages": plan.schedule.stages, "step": plan.seconds, "gap": plan.gap,
        "bound": plan.bound, "progress": lines,
    }  # fmt: skip
    print(json.dumps(result))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]))
