"""Lower bounds: those that are known, and that no schedule beats them, least of all the best one of a tiny pipe."""

import random
import re
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipework.schedule import KINDS, SCHEDULES, Costs, build, lower_bound, simulate, validate, with_recompute

SLACK = 1 + 1e-9


def share(stages_per_worker):
    """Costs of a stage, if a worker's whole share takes 1 forward and 2 backward and a micro-batch holds 1."""
    v = stages_per_worker
    return Costs(forward=1 / v, backward=2 / v, activation=1 / v)


def check(schedule, costs, *, loss_outside=False):
    result = simulate(schedule, costs, loss_outside=loss_outside)
    assert result.lower_bound <= result.makespan * SLACK


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "eager-1f1b", "zb-h1", "zb-v", "forward-only"])
def test_makespans_that_cannot_be_shorter(name):
    for p in (1, 2, 3, 5, 8):
        for m in (1, 2, 3, 8, 20):
            schedule = build(name, workers=p, chunks=m)
            result = simulate(schedule, share(schedule.stages // p))
            assert result.lower_bound == result.makespan
            assert result.gap == 0


@pytest.mark.parametrize("m", [1, 2, 7])
def test_one_worker(m):
    costs = Costs([1, 2, 0], backward=[3, 0, 5], activation=[1, 0, 2])
    assert lower_bound((0, 0, 0), m, costs) == 11 * m
    assert lower_bound((0, 0, 0), m, costs, memory_limit=3) == 11 * m
    assert lower_bound((0, 0, 0), m, costs, inference=True, memory_limit=2) == 3 * m
    assert lower_bound((0, 0, 0), m, costs, recomputed=True) == 14 * m


def test_memory_for_one_micro_batch_lets_it_through_alone():
    """Each trip takes 4 workers x (F + I), the hops, and W of stage 0, before the next may begin."""
    for least in (1, 1 - 1e-12):  # a sum that drifted
        assert lower_bound(range(4), 5, Costs(transfer=0.5), memory_limit=[least, inf, inf, inf]) == 5 * 12


cost = st.one_of(st.sampled_from([0.0, 1.0]), st.floats(0.01, 4))


@st.composite
def any_costs(draw, stages, halves_add_up=True):
    each = st.lists(cost, min_size=stages, max_size=stages)
    return Costs(
        forward=draw(each),
        backward=None if halves_add_up else draw(each),
        recompute=draw(st.one_of(st.none(), each)),
        input_gradient=draw(each),
        weight_gradient=draw(each),
        transfer=draw(st.lists(cost, min_size=stages - 1, max_size=stages - 1)),
        activation=draw(st.one_of(st.sampled_from([1.0, 0.1]), each)),
        checkpoint_activation=draw(st.one_of(st.sampled_from([0.0, 0.25]), each)),
        waiting=draw(st.one_of(st.none(), st.sampled_from([0.0, 0.5, 1.5]), each)),
    )


@given(st.sampled_from(sorted(SCHEDULES)), st.integers(1, 6), st.integers(1, 12), st.data())
def test_no_schedule_with_a_name_beats_them(name, p, m, data):
    kinds = SCHEDULES[name]
    v = data.draw(st.sampled_from((2, 4) if name == "hanayo" else (1, 2, 3))) if kinds.any_stages_per_worker else None
    stages = p * (v or kinds.stages_per_worker)
    costs = data.draw(any_costs(stages, data.draw(st.booleans())))
    timed = Costs(forward=data.draw(st.lists(st.floats(0.125, 4), min_size=stages, max_size=stages)))
    schedule = build(name, workers=p, chunks=m, stages_per_worker=v, costs=data.draw(st.sampled_from([None, timed])))
    outside = data.draw(st.booleans())
    if not schedule.inference:
        schedule = with_recompute(schedule, data.draw(st.sampled_from([0, 0, m, m // 2])), loss_outside=outside)
    check(schedule, costs, loss_outside=outside and validate(schedule, loss_outside=True).ok)


def best(placement, m, costs, limits, *, split, inference, repeats):
    """The least makespan of all orders within the limits; infinite if there are none.

    A search over sets of actions that are done, each with all the times that may still turn out best: when workers
    are free, and when the data of each micro-batch's next step arrives.
    """
    c, stages, workers = costs.spread(len(placement)), len(placement), range(len(limits))
    steps = stages if inference else 2 * stages  # of a micro-batch, through the pipe and back

    def stage_at(step):
        return step if step < stages else 2 * stages - 1 - step

    def held(state, worker):
        total = 0.0
        for i, (step, weights, again) in enumerate(state):
            for s in range(stages):
                if placement[s] == worker and step > s and (step <= 2 * stages - 1 - s or s in weights):
                    small = (s, i) in repeats and s not in again
                    total += 0 if inference else c["checkpoint_activation"][s] if small else c["activation"][s]
        return total

    def choices(state):
        """(micro-batch, its state afterwards, kind, stage, whether it must wait for data)."""
        for i, (step, weights, again) in enumerate(state):
            for s in weights:
                yield i, (step, weights - {s}, again), "W", s, False
            for s in range(min(step, stages)):
                if (s, i) in repeats and s not in again:
                    yield i, (step, weights, again | {s}), "R", s, False
            if step == steps:
                continue
            s = stage_at(step)
            if step < stages:
                yield i, (step + 1, weights, again), "F", s, True
            elif (s, i) not in repeats or s in again:
                yield i, (step + 1, weights, again), "B", s, True
                if split:
                    yield i, (step + 1, weights | {s}, again), "I", s, True

    def after(times, i, step, kind, s, waits):
        free, arrivals = (list(each) for each in times)
        worker = placement[s]
        start = max(free[worker], arrivals[i] if waits else 0.0)
        free[worker] = end = start + c[KINDS[kind].cost][s]
        if waits and step + 1 < steps:
            near = stage_at(step + 1)
            hop = c["transfer"][min(s, near)] if placement[near] != worker else 0.0
            arrivals[i] = end + hop
        elif waits:
            arrivals[i] = 0.0
        return tuple(map(tuple, (free, arrivals)))

    def keep(front, new):
        def no_worse(one, other):
            return all(a <= b for a, b in zip(one[0] + one[1], other[0] + other[1], strict=True))

        if not any(no_worse(old, new) for old in front):
            front[:] = [old for old in front if not no_worse(new, old)] + [new]

    nothing = (0, frozenset(), frozenset())
    layer = {(nothing,) * m: [((0.0,) * len(workers), (0.0,) * m)]}
    ends = []
    while layer:
        following = {}
        for state, front in layer.items():
            ways = list(choices(state))
            if not ways:
                ends += front
            for i, afterwards, kind, s, waits in ways:
                new = (*state[:i], afterwards, *state[i + 1 :])
                worker = placement[s]
                peak = held(state, worker)
                if kind in "FR":
                    small = c["checkpoint_activation"][s] if (s, i) in repeats else c["activation"][s]
                    before = small if kind == "R" else 0.0
                    at_end = small if kind == "F" else c["activation"][s]
                    peak += max(at_end, c["activation"][s]) - before
                if peak <= limits[worker] + 1e-9:
                    for times in front:
                        keep(following.setdefault(new, []), after(times, i, state[i][0], kind, s, waits))
        layer = following
    return min((max(free) for free, _ in ends), default=inf)


def tiny(seed):
    """A random tiny pipe: whether there is a schedule, the best of it, and its bound."""
    draw = random.Random(seed)
    placement = draw.choice([(0,), (0, 0), (0, 1), (0, 1), (0, 1), (0, 1, 1, 0), (0, 1, 0), (1, 0, 1)])
    m = draw.choice([1, 2, 3] if len(placement) < 3 else [1, 2] if len(placement) < 4 else [1])
    inference, split = draw.random() < 0.1, draw.random() < 0.7

    def numbers(most):
        each = [draw.randint(0, most) for _ in placement]
        return each[:1] * len(each) if draw.random() < 0.4 else each

    costs = Costs(
        forward=numbers(4),
        backward=numbers(6) if draw.random() < 0.2 else None,
        recompute=numbers(4),
        input_gradient=numbers(4),
        weight_gradient=numbers(4),
        transfer=numbers(3)[1:],
        activation=numbers(3),
        checkpoint_activation=numbers(2),
    )
    pairs = [(s, i) for s in range(len(placement)) for i in range(m)]
    share_of = 0 if inference or len(pairs) > 4 else draw.choice([0, 0, 0.5, 1])
    repeats = {pair for pair in pairs if draw.random() < share_of}
    limits = [draw.choice([inf, *range(1, 8)]) for _ in range(1 + max(placement))]
    options = {"split": split, "inference": inference}
    found = best(placement, m, costs, limits, repeats=repeats, **options)
    counts = [sum(s == stage for s, _ in repeats) for stage in range(len(placement))]
    try:
        return found, lower_bound(placement, m, costs, memory_limit=limits, recomputed=counts, **options)
    except ValueError:
        return found, inf


@pytest.mark.parametrize("seeds", [range(60), pytest.param(range(60, 1000), marks=pytest.mark.slow)])
@pytest.mark.thorough
def test_the_best_of_all_schedules_does_not_beat_them(seeds):
    tight = possible = 0
    for seed in seeds:
        makespan, bound = tiny(seed)
        assert bound <= makespan * SLACK, seed
        possible += makespan < inf
        tight += bound * SLACK >= makespan < inf
    assert tight > 0.85 * possible > 0.6 * len(seeds)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"placement": (0, -1)}, "stage 1 is placed on worker -1"),
        ({"micro_batches": 0}, "micro_batches is 0: wanted an integer of at least 1"),
        (
            {"memory_limit": 0.5},
            "memory_limit of worker 0 is 0.5, but one micro-batch holds 1 there, so no schedule exists: raise the "
            "limit to 1, or place fewer stages on the worker",
        ),
        ({"placement": (0, 0), "memory_limit": 1}, "one micro-batch holds 2 there"),
        ({"recomputed": [1]}, "recomputed is [1]: wanted True, or for each of 2 stages how many"),
        ({"recomputed": [1, 3]}, "recomputed is [1, 3]: wanted True, or for each of 2 stages"),
        ({"recomputed": True, "inference": True}, "an integer from 0 to 0"),
    ],
)
def test_what_is_refused(arguments, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        lower_bound(**{"placement": (0, 1), "micro_batches": 2} | arguments)


def test_one_micro_batch_fits_where_inference_or_recomputation_frees_memory():
    lower_bound((0, 0), 2, memory_limit=1, inference=True)
    lower_bound((0, 0), 2, memory_limit=1, recomputed=True)
