"""How large a schedule can be made and measured, in which time and memory?

ZB-V, two stages per worker, in pure Python on one core, each size in a process of its own. To reach with 1,024 workers
and 1,024 micro-batches: made in a minute, measured and simulated in 30 s and 1 GiB beside the schedule, 2 GiB in all.
"""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

from benchmarks import harness
from benchmarks.harness import Verdict

SIZES = ("64x512", "128x256", "256x512", "512x512", "1024x1024")
STEPS = ("build", "validate", "measure", "simulate", "critical path", "bounds")
# Seconds, for the last of these sizes.
TARGETS = {"build": 60.0, "measure": 30.0, "simulate": 30.0, "bounds": 2.0}
BESIDE_GIB = 1.0
WHOLE_GIB = 2.0


def in_a_process(size: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.scale.one_size", *size.split("x")],
        capture_output=True,
        text=True,
        check=True,
    )
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def main(argv: list[str] | None = None) -> None:
    options = harness.Options(__doc__)
    options.add_argument("--sizes", nargs="+", metavar="WORKERSxCHUNKS", help=f"default {' '.join(SIZES)}")
    arguments = options.parse_args(argv)
    with harness.on_this_machine() as machine:
        results = [in_a_process(size) for size in arguments.sizes or (SIZES[:2] if arguments.quick else SIZES)]

    rows = []
    for each in results:
        size = f"{each['workers']} x {each['chunks']}, {each['actions']:,} actions"
        cells = [f"{each['seconds'][name]:.3g} s" for name in STEPS]
        rows.append([size, *cells, *(f"{each[what]:.0f} MiB" for what in ("schedule", "most"))])
        rows.append(["of the processor", *(f"{each['processor'][name]:.3g} s" for name in STEPS), "", ""])
        rows.append(["beside the schedule", *(f"{max(0, each['beside'][name]):.0f} MiB" for name in STEPS), "", ""])
    harness.print_table(["workers x micro-batches", *STEPS, "schedule", "process"], rows)
    last = results[-1]
    verdicts = [
        Verdict(f"{name}, {last['actions']:,} actions", last["seconds"][name], most, "s")
        for name, most in TARGETS.items()
    ]
    verdicts += [
        Verdict(f"{name}, beside the schedule", last["beside"][name] / 2**10, BESIDE_GIB, "GiB")
        for name in ("measure", "simulate")
    ]
    verdicts.append(Verdict("the whole process", last["most"] / 2**10, WHOLE_GIB, "GiB"))
    harness.conclude("scale", arguments, machine, verdicts, {"unit": "seconds, MiB", "cases": results})


if __name__ == "__main__":
    main()
