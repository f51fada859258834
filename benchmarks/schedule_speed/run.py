"""How long do schedules take to make, to check and to simulate?

In pure Python, on one core, for growing sizes: to reach is a simulation of 196,608 actions (ZB-V, 64 workers, 512
micro-batches) in 2 s. The largest sizes have 1,024 workers, each in a process of its own, whose memory is looked at.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import time
from collections.abc import Sequence
from functools import partial
from statistics import median

from benchmarks import harness
from benchmarks.harness import Verdict
from pipework.schedule import SCHEDULES, Channel, Costs, Schedule, build, simulate, validate

SCHEDULES_MEASURED = ("1f1b", "zb-h1", "interleaved-zb", "zb-v")
SIZES = ((8, 32), (16, 64), (32, 256), (64, 512))
CHANNELS: tuple[Channel, ...] = ("pair", "worker")  # with transfers, for the largest of these sizes
LARGEST = 1024
TARGET = ("zb-v", 2.0)  # seconds, for the largest of these sizes


def size_text(schedule: Schedule) -> str:
    return f"{sum(map(len, schedule.orders)):,} actions"


def share(name: str) -> Costs:
    return Costs().placed((0,) * SCHEDULES[name].stages_per_worker)


def simulated(schedule: Schedule, costs: Costs, channel: Channel = "unbounded") -> float:
    return simulate(schedule, costs, channel=channel).makespan


def measure(name: str, workers: int, chunks: int, rounds: int, channels: Sequence[Channel] = ()) -> dict[str, object]:
    """The seconds of the three steps, and of simulations on channels that keep the order of transfers."""
    costs = share(name)
    schedule = build(name, workers=workers, chunks=chunks)
    seconds = harness.alternate(
        {
            "build": harness.timed(lambda: build(name, workers=workers, chunks=chunks)),
            "validate": harness.timed(lambda: validate(schedule)),
            "simulate": harness.timed(lambda: simulated(schedule, costs)),
            **{channel: harness.timed(partial(simulated, schedule, costs, channel)) for channel in channels},
        },
        rounds,
        warm_up=1,
    )
    return {"schedule": name, "workers": workers, "chunks": chunks, "actions": size_text(schedule), "seconds": seconds}


def once(name: str, workers: int, chunks: int) -> None:
    """Prints what the largest sizes take, for the process that asked."""
    start = time.perf_counter()
    schedule = build(name, workers=workers, chunks=chunks)
    built = time.perf_counter()
    simulated(schedule, share(name))
    ended = time.perf_counter()
    gib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    seconds = {"build": [built - start], "simulate": [ended - built]}
    found = {"schedule": name, "workers": workers, "chunks": chunks, "actions": size_text(schedule)}
    print(json.dumps({**found, "seconds": seconds, "GiB": gib}))


def in_a_process(name: str, workers: int, chunks: int) -> dict[str, object]:
    command = [sys.executable, "-m", __spec__.name, "--once", name, str(workers), str(chunks)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    result: dict[str, object] = json.loads(done.stdout)
    return result


def main(argv: list[str] | None = None) -> None:
    options = harness.Options(__doc__)
    options.add_amount("--rounds", 7, 3, "how often each is timed")
    options.add_argument("--largest", type=int, default=LARGEST, help=f"workers of the last rows (default {LARGEST})")
    options.add_argument("--once", nargs=3, metavar=("NAME", "WORKERS", "CHUNKS"), help="one size, as JSON")
    arguments = options.parse_args(argv)
    if arguments.once:
        name, workers, chunks = arguments.once
        once(name, int(workers), int(chunks))
        return
    sizes = [size for size in SIZES if size[0] <= arguments.largest]
    judged = (TARGET[0], *max(sizes, default=(0, 0)))
    with harness.on_this_machine() as machine:
        results = [
            measure(name, *size, arguments.rounds, CHANNELS if (name, *size) == judged else ())
            for size in sizes
            for name in SCHEDULES_MEASURED
        ]
        if not arguments.quick:
            results += [in_a_process(name, arguments.largest, arguments.largest) for name in SCHEDULES_MEASURED]

    steps = ("build", "validate", "simulate", *CHANNELS)
    rows = []
    verdicts = []
    for each in results:
        seconds = {what: median(times) for what, times in each["seconds"].items()}
        cells = [f"{seconds[what]:.3g} s" if what in seconds else "" for what in steps]
        memory = f"{each['GiB']:.2g} GiB" if "GiB" in each else ""
        rows.append([f"{each['schedule']}, {each['workers']} x {each['chunks']}", each["actions"], *cells, memory])
        if (each["schedule"], each["workers"], each["chunks"]) == judged:
            verdicts.append(Verdict(f"simulate {each['actions']}", seconds["simulate"], TARGET[1], "s"))
    harness.print_table(["workers x micro-batches", "", *steps, "process"], rows)
    harness.conclude("schedule_speed", arguments, machine, verdicts, {"unit": "seconds", "cases": results})


if __name__ == "__main__":
    main()
