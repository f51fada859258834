"""What one size takes, in a process of its own, which imports no more than it needs: `run.py` starts it."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from pipework.schedule import Costs, Simulation, build, lower_bound, measure, simulate, validate

NAME = "zb-v"
_PROCESS = Path("/proc/self")

Result = TypeVar("Result")


def memory(field: str) -> float:
    """The MiB that this process holds (``VmRSS``), or the most that it has held (``VmHWM``)."""
    lines = (_PROCESS / "status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) / 2**10 for line in lines if line.startswith(f"{field}:"))


def forget_the_most() -> None:
    """Begins anew to look for the most that this process holds."""
    (_PROCESS / "clear_refs").write_text("5", encoding="utf-8")


class Steps:
    """The seconds of each step, those of the processor, and the most MiB that it held beside what was there before."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.processor: dict[str, float] = {}
        self.beside: dict[str, float] = {}
        self.most = 0.0

    def run(self, name: str, step: Callable[[], Result]) -> Result:
        """Runs a step and returns its result."""
        forget_the_most()
        before, start, own = memory("VmRSS"), time.perf_counter(), time.process_time()
        result = step()
        self.seconds[name], self.processor[name] = time.perf_counter() - start, time.process_time() - own
        most = memory("VmHWM")
        self.beside[name], self.most = most - before, max(self.most, most)
        return result


def one_size(workers: int, chunks: int) -> dict[str, object]:
    """What a size takes, in this process."""
    costs = Costs().placed((0, 0))
    steps = Steps()
    empty = memory("VmRSS")
    schedule = steps.run("build", lambda: build(NAME, workers=workers, chunks=chunks))
    held = memory("VmRSS") - empty
    steps.run("validate", lambda: validate(schedule).ok)
    steps.run("measure", lambda: measure(schedule, costs))
    peaks = steps.run("simulate", lambda: peaks_of(simulate(schedule, costs)))
    steps.run("critical path", lambda: len(simulate(schedule, costs).critical_path))
    steps.run("bounds", lambda: lower_bound(schedule.placement, chunks, costs, memory_limit=peaks))
    return {
        "workers": workers,
        "chunks": chunks,
        "actions": sum(map(len, schedule.orders)),
        "schedule": held,
        "seconds": steps.seconds,
        "processor": steps.processor,
        "beside": steps.beside,
        "most": steps.most,
    }


def peaks_of(simulation: Simulation) -> tuple[float, ...]:
    assert simulation.makespan > 0
    return simulation.peak_memory


if __name__ == "__main__":
    print(json.dumps(one_size(int(sys.argv[1]), int(sys.argv[2]))))
