"""Schedules are refused if and only if a naive execution does not come to its end: five thousand random ones."""

from dataclasses import replace
from random import Random

import pytest

from pipework.schedule import (
    SCHEDULES,
    Action,
    Costs,
    ScheduleError,
    build,
    simulate,
    validate,
    with_communication,
    with_gradient_reduction,
    with_recompute,
    with_sharding,
    with_skips,
)
from tests.schedule.analysis.brute_force import runs
from tests.schedule.orders_text import to_orders_text

CHANNELS = ("unbounded", "pair", "worker")
CASES = 5_000


def some_schedule(random):
    """A named schedule, or one whose order is any, with or without what passes add."""
    name = random.choice(sorted(SCHEDULES))
    schedule = build(name, workers=random.randint(1, 4), chunks=random.randint(1, 4))
    if random.random() < 0.1:
        orders = [list(order) for order in schedule.orders]
        for order in orders:
            random.shuffle(order)
        return replace(schedule, orders=orders)
    if random.random() < 0.3 and not schedule.inference:
        schedule = with_recompute(schedule, random.randint(0, schedule.micro_batches))
    if random.random() < 0.4:
        stages = tuple(sorted(random.choices(range(schedule.stages), k=2)))
        schedule = with_skips(schedule, [stages, (0, schedule.stages - 1)])
    if random.random() < 0.2 and not schedule.inference:
        schedule = with_gradient_reduction(schedule)
    if random.random() < 0.6:
        schedule = with_communication(schedule, channel=random.choice(["pair", "worker"]))
    if random.random() < 0.1:
        schedule = with_sharding(schedule, random.randint(1, 3))
    return schedule


def mutated(schedule, random):
    """Some actions dropped, doubled, moved, swapped or changed."""
    orders = [list(order) for order in schedule.orders]
    for _ in range(random.choice([0, 1, 1, 1, 2, 3])):
        order = random.choice(orders)
        if len(order) < 2:
            continue
        here, there = (random.randrange(len(order)) for _ in range(2))
        match random.choice(["drop", "swap", "swap", "next", "next", "next", "double", "move", "worker", "change"]):
            case "drop":
                del order[here]
            case "swap":
                order[here], order[there] = order[there], order[here]
            case "next":
                here = max(here, 1)
                order[here - 1], order[here] = order[here], order[here - 1]
            case "double":
                order.insert(there, order[here])
            case "move":
                order.insert(there, order.pop(here))
            case "worker":
                random.choice(orders).append(order.pop(here))
            case "change" if order[here].kind in "FBIWR" and not schedule.inference:
                order[here] = order[here]._replace(kind=random.choice("FBIWR"))
    if not any(action.micro_batch >= 0 for order in orders for action in order):
        orders[schedule.placement[0]].append(Action("F", 0, 0))
    return replace(schedule, name="mutated", orders=orders)


@pytest.mark.parametrize(
    "part",
    [
        0,
        *(pytest.param(part, marks=pytest.mark.thorough) for part in range(1, 3)),
        *(pytest.param(part, marks=pytest.mark.slow) for part in range(3, 10)),
    ],
)
def test_refused_if_and_only_if_a_naive_run_fails(part):
    random = Random(part)
    verdicts = {True: 0, False: 0}
    for _ in range(CASES // 10):
        schedule = mutated(some_schedule(random), random)
        conditions = {
            "channel": random.choice(CHANNELS),
            "loss_outside": random.random() < 0.1,
            "memory_limit": random.choice([None, None, None, 1, 2.5, 4]),
        }
        found = validate(schedule, **conditions)
        # Without transfers among the actions, channels carry them as the pass posts them.
        naive = runs(schedule, random, **conditions)
        told = f"{conditions}\n{to_orders_text(schedule)}\n{found.violations}"
        assert found.ok == naive, told
        verdicts[naive] += 1
        if naive:
            costs = Costs(*(random.choice([0.0, 0.25, 1.0]) for _ in range(2)), transfer=random.choice([0.0, 0.5]))
            result = simulate(schedule, costs, **conditions)
            assert result.critical_path[0].start == 0
            assert result.critical_path[-1].end == result.makespan
        else:
            with pytest.raises(ScheduleError, match="schedule 'mutated' cannot be executed"):
                simulate(schedule, **conditions)
    assert min(verdicts.values()) > CASES // 100, "the cases are too much alike"
