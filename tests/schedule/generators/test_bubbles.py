"""Bubbles and memory of all schedules against their formulas."""

import pytest

from pipework.schedule import Costs, build, simulate

# fmt: off
# Of workers and micro-batches, where F = I = W and transfers take no time: the bubble in percent of the makespan, and
# after a slash of the longest busy window if that differs; the peak memory in activations of a worker's share.
NAMES = ("gpipe", "1f1b", "interleaved-1f1b", "zb-h1", "zb-h2", "interleaved-zb", "zb-v", "v-half", "v-min")
TABLE = {
    (2, 8):   "11.1 @8,  11.1 @2,  5.9 @2.5,   4.0 @2,   4.0/0.0 @3,    2.0 @2,  2.0/0.0 @2,  2.0 @2,  5.9 @2",
    (4, 8):   "27.3 @8,  27.3 @4,  15.8 @5.5,  11.1 @4,  11.1/0.0 @7,   5.9 @4,  5.9/0.0 @4,  9.4 @3,  18.6 @2",
    (4, 16):  "15.8 @16, 15.8 @4,  8.6 @5.5,   5.9 @4,   5.9/0.0 @7,    3.0 @4,  3.0/0.0 @4,  5.0 @3,  10.3 @2",
    (8, 8):   "46.7 @8,  46.7 @8,  30.4 @8,    22.6 @8,  29.4/22.6 @8,  12.7 @8, 12.7 @8,     26.2 @5, 36.0 @4",
    (8, 16):  "30.4 @16, 30.4 @8,  17.9 @11.5, 12.7 @8,  12.7/0.0 @15,  6.8 @8,  6.8/0.0 @8,  15.0 @5, 22.0 @4",
    (8, 32):  "17.9 @32, 17.9 @8,  9.9 @11.5,  6.8 @8,   6.8/0.0 @15,   3.5 @8,  3.5/0.0 @8,  8.1 @5,  12.3 @4",
    (16, 64): "19.0 @64, 19.0 @16, 10.5 @23.5, 7.2 @16,  7.2/0.0 @31,   3.8 @16, 3.8/0.0 @16, 9.6 @9,  13.3 @6",
}
# fmt: on


def share(stages_per_worker):
    """Costs of a stage, if a worker's whole share takes 1 forward and 2 backward and a micro-batch holds 1."""
    v = stages_per_worker
    return Costs(forward=1 / v, backward=2 / v, activation=1 / v)


def figure(result):
    bubbles = dict.fromkeys(f"{100 * each:.1f}" for each in (result.bubble, result.span_bubble))
    return f"{'/'.join(bubbles)} @{max(result.peak_memory):g}"


@pytest.mark.parametrize("column", range(len(NAMES)), ids=NAMES)
@pytest.mark.parametrize(("size", "expected"), TABLE.items())
def test_published_figures(size, expected, column):
    schedule = build(NAMES[column], workers=size[0], chunks=size[1])
    assert figure(simulate(schedule, share(schedule.stages // size[0]))) == expected.split(",")[column].strip()


def bubble(name, p, m, v=1):
    """The idle time of each worker, in forwards of a worker's whole share."""
    result = simulate(build(name, workers=p, chunks=m, stages_per_worker=v), share(v))
    return result.makespan - (m if name == "forward-only" else 3 * m)


@pytest.mark.parametrize("p", [*range(1, 9), 11])
def test_formulas(p):
    for m in (2 * p, 2 * p + 1, 4 * p):
        assert bubble("eager-1f1b", p, m) == 3 * (p - 1)
        assert bubble("zb-h1", p, m) == p - 1
        assert bubble("zb-h2", p, m) == p - 1
        assert simulate(build("zb-h2", workers=p, chunks=m)).span == 3 * m
        assert bubble("zb-v", p, m, 2) == (p - 1) / 2
        assert bubble("dualpipe-v", p, m, 2) == (p - 1) / 2
        assert bubble("hanayo", p, m, 2) == 3 * (p - 1) / 2 + (1 / 2 if p % 2 == 0 else 0)
        assert bubble("forward-only", p, m) == p - 1
        for v in (1, 2, 3, 4):
            if m % p == 0:
                assert bubble("interleaved-zb", p, m, v) == pytest.approx((p - 1) / v)
                assert bubble("interleaved-1f1b", p, m, v) == pytest.approx(3 * (p - 1) / v)
            assert bubble("looped-bfs", p, m, v) == pytest.approx(3 * (p - 1) / v)
            assert bubble("forward-only", p, m, v) == pytest.approx((p - 1) / v)
    for m in (4 * p, 4 * p + 1):
        if p > 2:
            assert bubble("v-half", p, m, 2) == (3 * p - 4 if p % 2 else 3 * p - 7) / 2
        if p > 1:
            assert bubble("v-min", p, m, 2) == (4 * p - 5 if p % 3 else 4 * p - 7) / 2


@pytest.mark.parametrize("p", range(1, 9))
def test_hanayo_of_several_waves(p):
    for v in (4, 6):
        for m in (2 * p, 3 * p, 4 * p):
            assert bubble("hanayo", p, m, v) <= (4 * p + 1) / v + 1e-9
