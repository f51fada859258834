from pipework.schedule import Action, Costs, fill_drain, with_communication
from pipework.schedule.analysis.events import LOSS, Deadlock, run
from tests.schedule.orders_text import from_orders_text

UNIT = Costs().spread(stages=2)


def parsed(text):
    return Action.parse(text)


def test_a_deadlock_names_the_action_and_the_missing_product():
    crossed = "schedule crossed\nplacement 0 1\nworker 0 0F0 0B0 0F1 0B1\nworker 1 1F0 1F1 1B0 1B1"
    ended = run(from_orders_text(crossed), UNIT)
    assert ended.deadlocks == (
        Deadlock(0, parsed("0B0"), parsed("1I0")),
        Deadlock(1, parsed("1F1"), parsed("0F1")),
    )
    assert list(map(len, ended.times)) == [1, 1]


def test_a_loss_outside_is_the_cause_of_the_first_backward():
    schedule = fill_drain(2, 2)
    ended = run(schedule, UNIT, loss_outside=True)
    assert ended.last_forward == parsed("1F1")
    # Worker 1 is not delayed by the loss, because it runs the last forward.
    assert ended.cause(parsed("1B0"), 1, 2) is None
    early = from_orders_text("schedule early\nplacement 0\nworker 0 0F0 0B0 0F1 0B1")
    assert run(early, Costs().spread(stages=1), loss_outside=True).deadlocks == (Deadlock(0, parsed("0B0"), LOSS),)


def test_transfers_take_their_time_and_are_causes():
    schedule = with_communication(fill_drain(2, 1))
    ended = run(schedule, Costs(transfer=0.5).spread(stages=2), channel="pair")
    orders = [" ".join(map(str, order)) for order in schedule.orders]
    assert orders == ["0RECV_B0 0F0 0SEND_F0 0B0", "1RECV_F0 1F0 1B0 1SEND_B0"]
    assert ended.times[1][:2] == ((1.0, 1.5), (1.5, 2.5))
    assert ended.cause(parsed("1F0"), 1, 1) == parsed("1RECV_F0")
    assert ended.cause(parsed("1RECV_F0"), 1, 0) == parsed("0SEND_F0")
