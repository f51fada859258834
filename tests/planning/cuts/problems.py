"""Problems for the tests of this folder, and all their cuts."""

from fractions import Fraction
from itertools import combinations, pairwise

from hypothesis import strategies as st

from pipework.planning.cuts import Cut, CutProblem, cut_at
from pipework.planning.cuts.cut import fits
from pipework.schedule.placement import loop_placement, wave_placement

PLACEMENTS = {
    "linear": [(0,), (0, 1), (0, 1, 2), (2, 0, 1), (0, 1, 2, 3)],
    "v": [(0, 0), (0, 1, 1, 0), (1, 0, 0, 1), (0, 1, 2, 2, 1, 0)],
    "other": [loop_placement(2, 2), loop_placement(2, 3), loop_placement(3, 2), wave_placement(2, 4), (0, 0, 1)],
}


def every_cut(problem: CutProblem) -> list[Cut]:
    """All cuts within the limits."""
    ends = [(0, *chosen, problem.layers) for chosen in combinations(range(1, problem.layers), problem.stages - 1)]
    cuts = (cut_at(problem, [after - before for before, after in pairwise(each)]) for each in ends)
    return [cut for cut in cuts if fits(cut)]


def descending(cut: Cut) -> list[Fraction]:
    """The loads, largest first, not rounded."""
    problem = cut.problem
    loads = [Fraction(0)] * problem.workers
    start = 0
    for stage, (worker, layers) in enumerate(zip(problem.placement, cut.balance, strict=True)):
        loads[worker] += sum(map(Fraction, problem.seconds[stage][start : start + layers]))
        start += layers
        if stage + 1 < problem.stages and problem.placement[stage + 1] != worker:
            rows = problem.boundary
            crossing = Fraction(rows if isinstance(rows, float) else rows[stage][start - 1])
            loads[worker] += crossing
            loads[problem.placement[stage + 1]] += crossing
    return sorted(loads, reverse=True)


@st.composite
def problems(draw: st.DrawFn, kind: str) -> CutProblem:
    """Small problems with whatever a problem can have."""
    placement = draw(st.sampled_from(PLACEMENTS[kind]))
    stages, workers = len(placement), max(placement) + 1
    layers = stages + draw(st.integers(0, 11 - stages))
    numbers = draw(st.sampled_from([st.integers(0, 6), st.integers(0, 12).map(lambda tenths: tenths / 10)]))

    def rows(count: int, length: int) -> list[list[float]]:
        row = st.lists(numbers, min_size=length, max_size=length)
        return draw(st.one_of(row.map(lambda one: [one] * count), st.lists(row, min_size=count, max_size=count)))

    limited = draw(st.booleans())
    memory = rows(stages, layers) if limited else []
    even = sum(map(sum, memory)) / stages / workers
    shares = st.lists(st.sampled_from([0.7, 0.9, 1, 1.1, 1.5, 2, 9]), min_size=workers, max_size=workers)
    limits = [max(0.1, even * share) for share in draw(shares)] if limited else None
    boundary = draw(st.sampled_from([0.0, 0.5, None]))
    return CutProblem(
        placement,
        rows(stages, layers),
        memory,
        limits,
        rows(stages - 1, layers - 1) if boundary is None else boundary,
    )
