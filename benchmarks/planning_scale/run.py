"""How large a pipeline can be planned, in which time and memory, and how far from the best is it?

A made profile with layers of three sizes, two for each worker and two more; each size in a process of its own. To
reach: 64 workers with 512 micro-batches in 60 s; 1,024 with as many in ten minutes and 4 GiB; both with the gap.
"""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

from benchmarks import harness
from benchmarks.harness import Verdict

# Seconds to search for, and to reach in all.
SIZES = {"64x512": (50.0, 60.0), "1024x1024": (420.0, 600.0)}
QUICK = ("16x32",)
GIB = 4.0


def in_a_process(size: str, seconds: float) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.planning_scale.one_size", *size.split("x"), str(seconds)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def main(argv: list[str] | None = None) -> None:
    options = harness.Options(__doc__)
    options.add_argument("--sizes", nargs="+", metavar="WORKERSxCHUNKS", help=f"default {' '.join(SIZES)}")
    options.add_argument("--seconds", type=float, help="to search for; default what the targets leave for it")
    arguments = options.parse_args(argv)
    with harness.on_this_machine() as machine:
        results = {
            size: in_a_process(size, arguments.seconds or SIZES.get(size, (10.0, 0.0))[0])
            for size in arguments.sizes or (QUICK if arguments.quick else SIZES)
        }
    rows, verdicts = [], []
    for size, each in results.items():
        rows.append(
            [
                f"{each['workers']} x {each['chunks']}, {each['layers']:,} layers", f"{each['budget']:.0f} s",
                f"{each['seconds']:.1f} s", f"{each['gib']:.2f} GiB",
                f"{each['schedule']}, {each['stages'] // each['workers']} per worker", f"{each['step']:.4g} s",
                f"{each['bound']:.4g} s, {each['gap']:.1%}",
            ]
        )  # fmt: skip
        if size in SIZES:
            verdicts.append(Verdict(f"{size}, planned in", each["seconds"], SIZES[size][1], "s"))
        verdicts.append(Verdict(f"{size}, the whole process", each["gib"], GIB, "GiB"))
    columns = [
        "workers x micro-batches",
        "budget",
        "took",
        "memory",
        "plan",
        "step",
        "bound of its stages, gap",
    ]
    harness.print_table(columns, rows)
    harness.conclude("planning_scale", arguments, machine, verdicts, {"unit": "seconds, GiB", "cases": results})


if __name__ == "__main__":
    main()
