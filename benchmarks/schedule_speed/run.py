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
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # so that the script runs from a checkout as it is

from benchmarks.measure import Verdict, alternate, conclude, on_this_machine, parser, print_table, timed
from pipework.schedule import SCHEDULES, Channel, Costs, Schedule, build, simulate, validate

SCHEDULES_MEASURED = ("1f1b", "zb-h1", "interleaved-zb", "zb-v")
SIZES = ((8, 32), (16, 64), (32, 256), (64, 512))
CHANNELS: tuple[Channel, ...] = ("pair", "worker")  # with transfers, for the largest of these sizes
LARGEST = 1024
TARGET = ("zb-v", 2.0)  # seconds, for the largest of these sizes


def size_text(schedule: Schedule) -> str:
    return f"{sum(map(len, schedule.orders)):,} actions"


def share(name: str) -> Costs:
    return Costs().divided(SCHEDULES[name].stages_per_worker)


def measure(name: str, workers: int, chunks: int, rounds: int, channels: Sequence[Channel] = ()) -> dict[str, object]:
    """The seconds of the three steps, and of simulations on channels that keep the order of transfers."""
    costs = share(name)
    schedule = build(name, workers=workers, chunks=chunks)
    seconds = alternate(
        {
            "build": timed(lambda: build(name, workers=workers, chunks=chunks)),
            "validate": timed(lambda: validate(schedule)),
            "simulate": timed(lambda: simulate(schedule, costs)),
            **{channel: timed(partial(simulate, schedule, costs, channel=channel)) for channel in channels},
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
    simulate(schedule, share(name))
    ended = time.perf_counter()
    gib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    seconds = {"build": [built - start], "simulate": [ended - built]}
    found = {"schedule": name, "workers": workers, "chunks": chunks, "actions": size_text(schedule)}
    print(json.dumps({**found, "seconds": seconds, "GiB": gib}))


def in_a_process(name: str, workers: int, chunks: int) -> dict[str, object]:
    command = [sys.executable, __file__, "--once", name, str(workers), str(chunks)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    result: dict[str, object] = json.loads(done.stdout)
    return result


def main(argv: list[str] | None = None) -> None:
    options = parser(__doc__)
    options.add_argument("--rounds", type=int, help="(default 7; with --quick 3)")
    options.add_argument("--largest", type=int, default=LARGEST, help=f"workers of the last rows (default {LARGEST})")
    options.add_argument("--once", nargs=3, metavar=("NAME", "WORKERS", "CHUNKS"), help="one size, as JSON")
    arguments = options.parse_args(argv)
    if arguments.once:
        name, workers, chunks = arguments.once
        once(name, int(workers), int(chunks))
        return
    rounds = arguments.rounds or (3 if arguments.quick else 7)
    sizes = [size for size in SIZES if size[0] <= arguments.largest]
    judged = (TARGET[0], *max(sizes, default=(0, 0)))
    with on_this_machine() as machine:
        results = [
            measure(name, *size, rounds, CHANNELS if (name, *size) == judged else ())
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
    print_table(["workers x micro-batches", "", *steps, "process"], rows)
    conclude("schedule_speed", arguments, machine, verdicts, {"unit": "seconds", "cases": results})


if __name__ == "__main__":
    main()
