import pytest

from pipework.schedule import Action, Costs, Interval, Timeline, build, simulate, with_offload, with_recompute
from pipework.timeline.recording import measured_costs

COSTS = Costs(
    forward=[1, 2, 1, 2],
    backward=[3, 5, 3, 5],
    recompute=[2, 1, 2, 1],
    transfer=[0.5, 0.25, 0.5],
    activation=[64, 128, 64, 128],
    checkpoint_activation=[8, 16, 8, 16],
    offload=[1, 0.5, 1, 2],
    reload=[0.5, 1, 0.25, 2],
)


@pytest.mark.parametrize("checkpointed", [0, 1, 2, 3])
@pytest.mark.parametrize(("name", "workers"), [("gpipe", 4), ("1f1b", 4), ("interleaved-1f1b", 2), ("looped-bfs", 2)])
def test_costs_of_a_simulation_are_found_again(name, workers, checkpointed):
    line = simulate(
        with_recompute(build(name, workers=workers, chunks=3), checkpointed, loss_outside=True), COSTS
    ).timeline
    costs = measured_costs([line], stages=4)
    assert (costs.forward, costs.backward) == (COSTS.forward, COSTS.backward)
    assert costs.recompute == (COSTS.recompute if checkpointed else COSTS.forward)
    assert costs.transfer == COSTS.transfer
    assert costs.activation == COSTS.activation
    assert costs.checkpoint_activation == (COSTS.checkpoint_activation if checkpointed else (0, 0, 0, 0))


@pytest.mark.parametrize("checkpointed", [0, 3, 6])
def test_costs_of_copies_are_found_again(checkpointed):
    schedule = with_recompute(build("gpipe", workers=4, chunks=6), checkpointed, loss_outside=True)
    costs = measured_costs([simulate(with_offload(schedule, COSTS), COSTS).timeline], stages=4)
    first = checkpointed == 6  # the inputs of the first stage do not move
    assert (costs.offload[first:], costs.reload[first:]) == (COSTS.offload[first:], COSTS.reload[first:])
    assert (costs.forward, costs.activation) == (COSTS.forward, COSTS.activation)


def test_a_transfer_is_measured_where_somebody_waits_for_it():
    # Worker 1 is free at 3, gets the value of micro-batch 0 at once, and waits 0.5 for the one of micro-batch 1.
    line = Timeline(
        (
            Interval(0, Action("F", 0, 0), 0, 1),
            Interval(0, Action("F", 0, 1), 1, 5),
            Interval(1, Action("F", 1, 7), 0, 3),
            Interval(1, Action("F", 1, 0), 3, 4),
            Interval(1, Action("F", 1, 1), 5.5, 6),
        ),
        workers=2,
    )
    assert measured_costs([line], stages=2).transfer == (0.5,)


def test_what_a_stage_never_did_follows_from_what_it_did():
    rows = [("F", 0, 1), ("B", 0, 3), ("F", 1, 2), ("I", 1, 2), ("W", 1, 1), ("R", 1, 4), ("F", 2, 5)]
    line = Timeline(tuple(Interval(0, Action(kind, stage, 0), 0, time) for kind, stage, time in rows), workers=1)
    costs = measured_costs([line], stages=3)
    assert costs.backward == (3, 3, 0)
    assert costs.input_gradient == (1.5, 2, 0)
    assert costs.weight_gradient == (1.5, 1, 0)
    assert costs.recompute == (1, 4, 5)
    nothing = measured_costs([], stages=2)
    assert (nothing.forward, nothing.backward) == ((0, 0), (0, 0))
