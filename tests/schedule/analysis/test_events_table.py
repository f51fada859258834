from math import isnan

from pipework.schedule import Action, Costs, fill_drain, with_communication, with_recompute, with_skips, zb_h1
from pipework.schedule.analysis.events import LOSS, Table


def needed(schedule, kind, stage, costs=None, *, loss_outside=False):
    spread = (costs or Costs()).spread(schedule.stages, len(schedule.skips))
    step = Table(schedule, spread, loss_outside=loss_outside).steps[kind][stage]
    return [(str(source.product.name), source.delay) for source in step.sources]


def test_an_action_needs_what_is_made_before_it():
    schedule = zb_h1(3, 2)
    costs = Costs(transfer=[0.5, 0.25])
    assert needed(schedule, "F", 0, costs) == []
    assert needed(schedule, "F", 1, costs) == [("0F", 0.5)]
    assert needed(schedule, "I", 1, costs) == [("1F", 0.0), ("2I", 0.25)]
    assert needed(schedule, "W", 1, costs) == [("1I", 0.0)]


def test_skips_and_a_loss_outside_are_needed_too():
    schedule = with_skips(fill_drain(3, 1), [(0, 2)])
    assert needed(schedule, "F", 2, Costs(skip_transfer=2)) == [("1F", 0.0), ("0F", 2.0)]
    assert needed(schedule, "B", 2, loss_outside=True) == [("2F", 0.0), (str(LOSS), 0.0)]


def test_a_micro_batch_that_is_not_recomputed_counts_as_done():
    schedule = with_recompute(fill_drain(1, 2), 1)
    assert needed(schedule, "B", 0) == [("0F", 0.0), ("0R", 0.0)]
    table = Table(schedule, Costs().spread(1), loss_outside=False)
    assert [*map(isnan, table.steps["R"][0].ends)] == [True, False]
    assert needed(fill_drain(1, 2), "B", 0) == [("0F", 0.0)]


def test_transfers_take_the_place_of_what_they_carry():
    schedule = with_communication(fill_drain(2, 1))
    table = Table(schedule, Costs(transfer=3).spread(2), loss_outside=False)
    assert table.steps["F"][1].sources[0].product.name == Action("RECV_F", 1, peer=0)
    assert table.transfers["SEND_F", 0, 1][0].delay == 3
    assert table.steps["SEND_F"] is None
