"""How much faster is a synthesised schedule than the best one that has a name, at the same memory?

Two stages per worker in V placement. Costs of a worker's whole share (forward, input half, weight half, transfer):
A 1 1 1 0, B 1 1.1 0.7 0.05, D 1 1.5 0.5 0.05, as for long contexts. Memory is in micro-batches of a worker's share.
"""

from __future__ import annotations

import time
from typing import NamedTuple

from benchmarks import harness
from benchmarks.harness import Verdict
from pipework.schedule import Costs, wave_placement
from pipework_synthesis import Synthesis, synthesize

COSTS = {
    "A": Costs(),
    "B": Costs(input_gradient=1.1, weight_gradient=0.7, transfer=0.05),
    "D": Costs(input_gradient=1.5, weight_gradient=0.5, transfer=0.05),
}


class Case(NamedTuple):
    workers: int
    chunks: int
    memory: int
    costs: str
    target: float | None = None  # the makespan to reach
    ahead: float = 0.0  # or by which share the best named schedule is to be slower

    def __str__(self) -> str:
        return f"{self.workers} x {self.chunks}, {self.memory}, {self.costs}"


SMALL = [
    Case(4, 8, 3, "D", 29.90),
    Case(4, 8, 2, "B", 31.90),
    Case(8, 8, 4, "A", 35.5),
    Case(8, 8, 5, "B", 35.00),
    Case(8, 8, 5, "D", 40.10),
    Case(8, 16, 4, "B", 66.75),
    Case(8, 16, 4, "D", 79.65),
    Case(8, 16, 5, "B", 57.4),
    Case(8, 16, 5, "D", 64.9),
    Case(8, 16, 6, "A", 54.0),
    Case(8, 16, 6, "B", 56.35),
    Case(8, 16, 6, "D", 63.35),
    Case(8, 16, 8, "B", 49.90),
]
LONG = [
    Case(8, 64, 5, "D", 220.05, 0.06),
    Case(8, 256, 5, "D", None, 0.06),
    *[Case(16, 64, memory, costs) for memory in (16, 12, 9, 6) for costs in "ABD"],
]


def found(case: Case, seconds: float, *, solver: bool | None) -> Synthesis:
    placement = wave_placement(case.workers, 2)
    costs = COSTS[case.costs].placed(placement)
    return synthesize(placement, case.chunks, costs, memory_limit=case.memory, seconds=seconds, solver=solver)


def main(argv: list[str] | None = None) -> None:
    options = harness.Options(__doc__)
    options.add_amount("--seconds", 60.0, 10.0, "how long to search, for each row")
    options.add_argument("--long-seconds", type=float, help="the same for the rows of many micro-batches")
    options.add_argument("--without-solver", action="store_true", help="as if OR-tools were not installed")
    options.add_argument("--only", choices=["small", "long"], help="a part of the table")
    arguments = options.parse_args(argv)
    cases = {"small": SMALL, "long": LONG}.get(arguments.only, SMALL + LONG)
    rows, verdicts, results = [], [], []
    with harness.on_this_machine() as machine:
        for case in cases:
            seconds = (case in LONG and arguments.long_seconds) or arguments.seconds
            start = time.perf_counter()
            result = found(case, seconds, solver=False if arguments.without_solver else None)
            used = time.perf_counter() - start
            name, best = min(result.named.items(), key=lambda item: item[1], default=("none", float("nan")))
            proven = " (optimal)" if result.optimal else ""
            target = "" if case.target is None else f"{case.target:g}"
            cells = [f"{name} {best:.2f}", target, f"{result.makespan:.2f}{proven}", f"{result.lower_bound:.2f}"]
            rows.append([str(case), *cells, f"{result.gain:.1%}", f"{used:.0f} s"])
            print(" | ".join(rows[-1]), "|", result.found_by, flush=True)
            if case.target is not None:
                verdicts.append(Verdict(f"makespan, {case}", result.makespan, case.target + 1e-6, "units"))
            if case in LONG:
                share = result.makespan / best
                verdicts.append(Verdict(f"of the named one's, {case}", share, 1 / (1 + case.ahead), "times"))
            results.append({**case._asdict(), "named": dict(result.named), "makespan": result.makespan,
                            "bound": result.lower_bound, "seconds": used, "found_by": result.found_by})  # fmt: skip
    print()
    header = ["workers x micro-batches, memory, costs", "best named", "to reach", "reached", "bound", "gain", "used"]
    harness.print_table(header, rows)
    harness.conclude("synthesis", arguments, machine, verdicts, {"unit": "makespan", "cases": results})


if __name__ == "__main__":
    main()
