"""How long does it take to find the best cuts, and how good are they where the search is not exact?

In pure Python, on one core, for layers whose seconds are random, and limits of memory. To reach: 0.04 s for the probes
of V placement with 97 layers and 16 workers, some seconds for a thousand layers. Where all cuts can be tried, the
heuristic for looped placement is compared with the best of them.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from itertools import combinations, pairwise
from statistics import median

from benchmarks import harness
from benchmarks.harness import Verdict
from pipework.planning.cuts import CutProblem, best_cut, best_cuts, bottleneck_bound, cut_at
from pipework.planning.cuts.bisection import WEIGHT, smallest
from pipework.planning.cuts.bounds import Shares, lowest
from pipework.planning.cuts.nested import Nested
from pipework.planning.cuts.search import Effort, optimum
from pipework.planning.cuts.tables import tables_of
from pipework.schedule.placement import loop_placement, wave_placement

PROBES = 0.04  # seconds
SOME = 5.0
# placement, layers, workers, unequal devices, boundaries whose seconds depend on the place
CASES = (
    ("linear", 97, 16, True, False),
    ("V", 97, 16, False, False),
    ("V", 97, 16, True, False),
    ("V", 97, 16, False, True),
    ("loop of 2", 97, 16, False, False),
    ("linear", 1000, 64, False, False),
    ("linear", 1000, 64, True, False),
    ("linear", 1000, 64, True, True),
    ("V", 1000, 64, False, False),
    ("V", 1000, 64, True, False),
    ("loop of 2", 1000, 64, False, False),
    ("linear", 1100, 1024, False, False),
    ("V", 1000, 256, False, False),
)
PLACEMENTS: dict[str, Callable[[int], tuple[int, ...]]] = {
    "linear": lambda workers: loop_placement(workers, 1),
    "V": lambda workers: wave_placement(workers, 2),
    "loop of 2": lambda workers: loop_placement(workers, 2),
}


def problem_of(name: str, layers: int, workers: int, unequal: bool, by_place: bool, seed: int = 0) -> CutProblem:
    """Layers of 0.5 to 1.5 seconds, and as many bytes; a worker has room for 1.3 times its share of them."""
    chance = random.Random(seed)
    placement = PLACEMENTS[name](workers)
    row = [chance.uniform(0.5, 1.5) for _ in range(layers)]
    slow = [chance.choice([1, 1.3, 1.7]) if unequal else 1 for _ in range(workers)]
    rows = {factor: [value * factor for value in row] for factor in slow}
    memory = [[chance.uniform(0.5, 1.5) for _ in range(layers)]] * len(placement)
    # With a layer or two for each worker, such limits would leave no cut.
    limits = [1.3 * layers / workers] * workers if layers > 3 * workers else None
    crossing = [[chance.uniform(0, 0.2) for _ in range(layers - 1)]] * (len(placement) - 1)
    return CutProblem(placement, [rows[slow[at]] for at in placement], memory, limits, crossing if by_place else 0.0)


def probe_seconds(problem: CutProblem) -> float:
    """The seconds of one sequence of nested probes, until the smallest bottleneck with full stages is found."""
    tables = tables_of(problem)
    start = time.perf_counter()
    weights = [WEIGHT] * problem.workers
    assert tables.added is not None
    smallest(tables, Nested(tables, Shares(tables), tables.added).probe, lowest(tables, weights), weights)
    return time.perf_counter() - start


def measured(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def by_trying_all(problem: CutProblem) -> float:
    """The smallest bottleneck."""
    inner = combinations(range(1, problem.layers), problem.stages - 1)
    ends = ((0, *chosen, problem.layers) for chosen in inner)
    return min(cut_at(problem, [after - before for before, after in pairwise(each)]).bottleneck for each in ends)


def quality(problems: int) -> list[float]:
    """By how much local search alone misses the smallest bottleneck of looped placement, as shares."""
    missed = []
    for seed in range(problems):
        chance = random.Random(seed)
        row = [chance.uniform(0.5, 1.5) for _ in range(14)]
        problem = CutProblem(loop_placement(3, 2), [row] * 6)
        tables = tables_of(problem)
        found = optimum(tables, [WEIGHT] * 3, Effort(branches=0))
        assert found is not None
        missed.append(cut_at(problem, tables.balance(found.cut)).bottleneck / by_trying_all(problem) - 1)
    return missed


def main(argv: list[str] | None = None) -> None:
    options = harness.Options(__doc__)
    options.add_amount("--rounds", 5, 1, "how often the probes are timed")
    options.add_amount("--problems", 20, 3, "problems whose cuts are all tried")
    options.add_argument("--largest", type=int, default=1100, help="layers of the largest problem (default 1100)")
    arguments = options.parse_args(argv)
    rows = []
    cases = []
    with harness.on_this_machine() as machine:
        probes = [probe_seconds(problem_of("V", 97, 16, False, False)) for _ in range(arguments.rounds)]
        for name, layers, workers, unequal, by_place in CASES:
            if layers > arguments.largest:
                continue
            problem = problem_of(name, layers, workers, unequal, by_place)
            one = measured(lambda problem=problem: best_cut(problem))  # type: ignore[misc]
            few = measured(lambda problem=problem: best_cuts(problem))  # type: ignore[misc]
            best = best_cut(problem)
            above = best.cut.bottleneck / best.bound - 1
            ideal = best.cut.bottleneck / bottleneck_bound(problem) - 1
            what = ", unequal devices" * unequal + ", boundaries" * by_place
            rows.append(
                [
                    f"{name}, {layers} layers, {workers} workers{what}",
                    f"{one:.3g} s",
                    f"{few:.3g} s",
                    f"{above:.2%}" if above else "exact",
                    f"{ideal:.2%}",
                ]
            )
            cases.append({"case": rows[-1][0], "best_cut": one, "best_cuts": few, "above": above, "ideal": ideal})
        missed = quality(arguments.problems)
    harness.print_table(["", "best_cut", "best_cuts", "above a proven bound", "above the simple bound"], rows)
    exact = sum(each < 1e-9 for each in missed)
    print(
        f"local search, loop of 2, 14 layers, 3 workers: best in {exact} of {len(missed)}, "
        f"{max(missed):.2%} above at most"
    )
    verdicts = [Verdict("probes, V, 97 layers, 16 workers", median(probes), PROBES, "s")]
    verdicts += [Verdict(f"best_cut, {case['case']}", case["best_cut"], SOME, "s") for case in cases]
    results = {"unit": "seconds", "probes": probes, "cases": cases, "missed": missed}
    harness.conclude("partition", arguments, machine, verdicts, results)


if __name__ == "__main__":
    main()
