import pytest

from pipework.schedule import Action, Costs, Interval, Timeline, fill_drain, simulate, with_recompute
from pipework.timeline.measure import measured_costs

COSTS = Costs(forward=[1, 2], backward=[3, 5], recompute=[2, 1], activation=[64, 128], checkpoint_activation=[8, 16])


@pytest.mark.parametrize("checkpointed", [0, 1, 2, 3])
def test_costs_of_a_simulation_are_found_again(checkpointed):
    line = simulate(with_recompute(fill_drain(2, 3), checkpointed), COSTS).timeline
    costs = measured_costs([line], stages=2)
    assert (costs.forward, costs.backward) == ((1, 2), (3, 5))
    assert costs.recompute == ((2, 1) if checkpointed else (1, 2))
    assert costs.activation == (64, 128)
    assert costs.checkpoint_activation == ((8, 16) if checkpointed else (0, 0))


@pytest.mark.parametrize("checkpointed", [1, 2, 3, 4])
def test_a_first_pass_may_hold_more_than_it_keeps(checkpointed):
    # As if activations of a checkpointed forward were dropped only at its end: keep 1, hold 10 meanwhile.
    kept, amounts = {}, []
    order = with_recompute(fill_drain(1, 4), checkpointed).orders[0]
    for kind, _, micro_batch in order:
        kept.pop(micro_batch, None)
        amounts.append(sum(kept.values()) + 10)
        if kind != "B":
            kept[micro_batch] = 1 if kind == "F" and micro_batch < checkpointed else 10
    row = tuple(Interval(0, action, t, t + 1, amounts[t]) for t, action in enumerate(order))
    costs = measured_costs([Timeline(row, workers=1)], stages=1)
    assert (costs.activation, costs.checkpoint_activation) == ((10,), (1,))


def test_medians_over_steps():
    lines = [Timeline((Interval(0, Action("F", 0, 0), 0, time),), workers=1) for time in (1, 2, 90)]
    assert measured_costs(lines, stages=1).forward == (2,)


def test_split_backward():
    row = [(kind, time) for kind, time in (("F", 1), ("I", 2), ("W", 4))]
    line = Timeline(tuple(Interval(0, Action(kind, 0, 0), 10 * time, 11 * time) for kind, time in row), workers=1)
    costs = measured_costs([line], stages=1)
    assert (costs.input_gradient, costs.weight_gradient, costs.backward) == ((2,), (4,), (0,))


def test_nothing_measured():
    assert measured_costs([], stages=2).forward == (0, 0)
