"""Bubbles and memory of all schedules against their formulas."""

import pytest

from pipework.schedule import Costs, fill_drain, interleaved_1f1b, looped_bfs, one_forward_one_backward, simulate

SIZES = [(1, 1), (1, 4), (2, 8), (4, 8), (4, 16), (8, 8), (8, 16), (8, 32), (16, 64)]

# fmt: off
# workers, micro-batches: bubble in percent and peak memory of gpipe, 1f1b and interleaved-1f1b of two stages per worker
TABLE = {
    (2, 8):   ("11.1 @8",  "11.1 @2",  "5.9 @2.5"),
    (4, 8):   ("27.3 @8",  "27.3 @4",  "15.8 @5.5"),
    (4, 16):  ("15.8 @16", "15.8 @4",  "8.6 @5.5"),
    (8, 8):   ("46.7 @8",  "46.7 @8",  "30.4 @8"),
    (8, 16):  ("30.4 @16", "30.4 @8",  "17.9 @11.5"),
    (8, 32):  ("17.9 @32", "17.9 @8",  "9.9 @11.5"),
    (16, 64): ("19.0 @64", "19.0 @16", "10.5 @23.5"),
}
# fmt: on


def share(stages_per_worker):
    """Costs of a stage, if a worker's whole share takes 1 forward and 2 backward and a micro-batch holds 1."""
    v = stages_per_worker
    return Costs(forward=1 / v, backward=2 / v, activation=1 / v)


@pytest.mark.parametrize(("size", "expected"), TABLE.items())
def test_published_figures(size, expected):
    results = (
        simulate(fill_drain(*size)),
        simulate(one_forward_one_backward(*size)),
        simulate(interleaved_1f1b(*size, 2), share(2)),
    )
    assert tuple(f"{100 * each.bubble:.1f} @{max(each.peak_memory):g}" for each in results) == expected


@pytest.mark.parametrize(("workers", "micro_batches"), SIZES)
def test_1f1b(workers, micro_batches):
    result = simulate(one_forward_one_backward(workers, micro_batches))
    assert result.makespan == 3 * (micro_batches + workers - 1)
    assert result.peak_memory == tuple(min(micro_batches, workers - worker) for worker in range(workers))


@pytest.mark.parametrize("stages_per_worker", [1, 2, 4])
@pytest.mark.parametrize(("workers", "micro_batches"), SIZES)
def test_several_stages_per_worker(workers, micro_batches, stages_per_worker):
    p, m, v = workers, micro_batches, stages_per_worker
    if m % p == 0:
        result = simulate(interleaved_1f1b(p, m, v), share(v))
        assert result.makespan == pytest.approx(3 * (m + (p - 1) / v))
        assert max(result.peak_memory) == pytest.approx(min(m, (2 * (p - 1) + (v - 1) * p + 1) / v))
        result = simulate(looped_bfs(p, m, v), share(v))
        assert result.makespan == pytest.approx(3 * (m + (p - 1) / v))
        assert max(result.peak_memory) == pytest.approx(m)


@pytest.mark.parametrize(("workers", "micro_batches"), [(4, 6), (4, 7), (8, 9), (8, 12), (3, 11), (8, 4), (4, 2)])
def test_counts_that_do_not_divide_are_never_worse_than_with_one_stage_per_worker(workers, micro_batches):
    bound = simulate(one_forward_one_backward(workers, micro_batches)).bubble
    for generator in (interleaved_1f1b, looped_bfs):
        assert simulate(generator(workers, micro_batches, 2), share(2)).bubble < bound
