"""How long does it take to find a good cut, and how good is it where the search is not exact?

In pure Python, on one core, for layers whose seconds are random, and limits of memory. To reach: some seconds for a
thousand layers. Where all cuts can be tried, the local search is compared with the best of them.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from itertools import accumulate, combinations
from math import inf

from benchmarks import harness
from benchmarks.harness import Verdict
from pipework.planning.cuts import CutProblem, best_cut
from pipework.schedule.placement import loop_placement, wave_placement

SOME = 5.0  # seconds
# placement, layers, workers, unequal devices
CASES = (
    ("linear", 97, 16, True),
    ("V", 97, 16, False),
    ("V", 97, 16, True),
    ("loop of 2", 97, 16, False),
    ("linear", 1000, 64, False),
    ("linear", 1000, 64, True),
    ("V", 1000, 64, False),
    ("V", 1000, 64, True),
    ("loop of 2", 1000, 64, False),
    ("linear", 1100, 1024, False),
    ("V", 1000, 256, False),
)
PLACEMENTS: dict[str, Callable[[int], tuple[int, ...]]] = {
    "linear": lambda workers: loop_placement(workers, 1),
    "V": lambda workers: wave_placement(workers, 2),
    "loop of 2": lambda workers: loop_placement(workers, 2),
}


def problem_of(name: str, layers: int, workers: int, unequal: bool, seed: int = 0) -> CutProblem:
    """Layers of 0.5 to 1.5 seconds, and as many KB; a worker has room for 1.3 times its share of them."""
    chance = random.Random(seed)
    placement = PLACEMENTS[name](workers)
    row = [chance.uniform(0.5, 1.5) for _ in range(layers)]
    slow = [chance.choice([1, 1.3, 1.7]) if unequal else 1 for _ in range(workers)]
    rows = {factor: [value * factor for value in row] for factor in slow}
    memory = [[chance.uniform(500, 1500) for _ in range(layers)]] * len(placement)
    # With a layer or two for each worker, such limits would leave no cut.
    limit = 1300 * layers / workers if layers > 3 * workers else inf
    return CutProblem(placement, [rows[slow[at]] for at in placement], memory, [limit] * workers)


def measured(run: Callable[[], object]) -> float:
    """The seconds of the processor, which do not depend on what else the machine does."""
    start = time.process_time()
    run()
    return time.process_time() - start


def most_work(problem: CutProblem, ends: list[int]) -> int:
    return max(problem.loads(ends, problem.work))


def above_ideal(problem: CutProblem) -> float:
    """By how much the most work of a worker is above that of all layers shared perfectly, as a share."""
    speeds = sum(problem.work[0][-1] / problem.work[stages[0]][-1] for stages in problem.held)
    ends = list(accumulate(best_cut(problem), initial=0))
    return most_work(problem, ends) * speeds / problem.work[0][-1] - 1


def missed(seed: int) -> float:
    """By how much local search misses the best cut of looped placement, as a share."""
    chance = random.Random(seed)
    row = [chance.uniform(0.5, 1.5) for _ in range(14)]
    problem = CutProblem(loop_placement(3, 2), [row] * 6, [[0] * 14] * 6, [inf] * 3)
    best = min(most_work(problem, [0, *inner, 14]) for inner in combinations(range(1, 14), 5))
    return most_work(problem, list(accumulate(best_cut(problem), initial=0))) / best - 1


def main(argv: list[str] | None = None) -> None:
    options = harness.Options(__doc__)
    options.add_amount("--problems", 20, 3, "problems whose cuts are all tried")
    options.add_argument("--largest", type=int, default=1100, help="layers of the largest problem (default 1100)")
    arguments = options.parse_args(argv)
    rows = []
    cases = []
    with harness.on_this_machine() as machine:
        for name, layers, workers, unequal in CASES:
            if layers > arguments.largest:
                continue
            problem = problem_of(name, layers, workers, unequal)
            one = measured(lambda problem=problem: best_cut(problem))  # type: ignore[misc]
            case = f"{name}, {layers} layers, {workers} workers{', unequal devices' * unequal}"
            cases.append({"case": case, "one": one, "above": above_ideal(problem)})
            rows.append([case, f"{one:.3g} s", f"{cases[-1]['above']:.2%}"])
        shares = [missed(seed) for seed in range(arguments.problems)]
    harness.print_table(["", "time", "above perfect sharing"], rows)
    exact = sum(each < 1e-9 for each in shares)
    print(f"local search, loop of 2, 14 layers, 3 workers: best in {exact} of {len(shares)}, {max(shares):.2%} above")
    verdicts = [Verdict(f"one cut, {case['case']}", case["one"], SOME, "s") for case in cases]
    harness.conclude("partition", arguments, machine, verdicts, {"unit": "seconds", "cases": cases, "missed": shares})


if __name__ == "__main__":
    main()
