from random import Random

import pytest

from pipework.schedule import Costs, loop_placement, simulate, wave_placement
from pipework_synthesis.greedy import Policy, greedy_orders, pattern_keys
from pipework_synthesis.patterns import offsets_of, random_delays, random_policy
from pipework_synthesis.problem import least_room, problem_of, schedule_of
from pipework_synthesis.times import Times


@pytest.mark.parametrize("seed", range(60))
def test_no_deadlock_and_within_memory_for_any_keys(seed: int) -> None:
    draws = Random(seed)
    placement = draws.choice([wave_placement(3, 2), loop_placement(2, 3), (0, 1, 2), (0, 1, 1, 0, 0, 1, 2)])
    stages, workers, m = len(placement), 1 + max(placement), draws.randrange(1, 7)

    def each(*values: float) -> list[float]:
        return [draws.choice(values) for _ in range(stages)]

    costs = Costs(
        each(1, 2),
        recompute=each(0.5, 2),
        input_gradient=each(1, 3),
        weight_gradient=each(0.5, 1),
        transfer=0.25,
        activation=each(1, 2),
        checkpoint_activation=each(0.25, 0.5),
        waiting=draws.choice([None, each(0.5, 1, 3)]),
    )
    counts = [draws.choice([0, 0, m, draws.randrange(m + 1)]) for _ in range(stages)]
    again = [draws.sample(range(m), count) for count in counts]
    spread, split = costs.spread(stages), draws.random() < 0.7
    free = problem_of(placement, m, spread, [0.0] * workers, again, split=split)
    limits = [room * draws.choice([1.0, 1.0, 1.5, 2.0]) for room in least_room(free)]  # as small as possible, or more
    problem = problem_of(placement, m, spread, limits, again, split=split)
    times = Times(problem)
    for _ in range(5):
        keys = pattern_keys(problem, offsets_of(problem, random_delays(problem, draws)), problem.work())
        policy = random_policy(draws)
        made = greedy_orders(problem, keys, policy)
        if made is None:
            assert policy.turns  # only turns can lead to a deadlock
            continue
        makespan, orders = made
        assert times.fits(orders)
        timed = times.plan(orders)
        assert timed is not None
        assert timed.makespan <= makespan + 1e-9
        found = simulate(schedule_of(problem, orders), costs, memory_limit=limits)
        if not any(again):
            assert found.makespan == pytest.approx(timed.makespan)


def test_weight_halves_fill_gaps() -> None:
    problem = problem_of((0, 1), 3, Costs().spread(2), (2, 2), [(), ()], split=True)
    made = greedy_orders(problem, pattern_keys(problem, [0, 1, 3, 2, 4, 3], 3.0), Policy())
    assert made is not None
    actions = [str(action) for action in schedule_of(problem, made[1]).orders[0]]
    assert actions == ["0F0", "0F1", "0I0", "0W0", "0F2", "0I1", "0W1", "0I2", "0W2"]
