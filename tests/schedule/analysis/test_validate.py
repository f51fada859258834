import pytest

from pipework.schedule import Action, Schedule, ScheduleError, fill_drain, forward_only, validate
from tests.schedule.orders_text import schedule_of


def messages(schedule, **options):
    return [violation.message for violation in validate(schedule, **options).violations]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0F0", "0B0 (or 0I0 and 0W0) is missing in the order of worker 0"),
        ("0B0", "0F0 is missing in the order of worker 0"),
        ("0F0 0B0 0B0", "0B0 occurs 2 times, wanted once"),
        ("0F0 0R0 0R0 0B0", "0R0 occurs 2 times, wanted once"),
        ("0F0 0I0", "0W0 is missing in the order of worker 0, which has 0I0"),
        ("0F0 0W0", "0I0 is missing in the order of worker 0, which has 0W0"),
        ("0F0 0B0 0W0", "worker 0 has both 0B0 and 0W0: wanted either B, or I and W"),
        ("0B0 0F0", "worker 0 waits forever at 0B0: it needs 0F0, which is later in its own order"),
        ("0F0 0B0 0R0", "worker 0 waits forever at 0B0: it needs 0R0, which is later in its own order"),
        ("0R0 0F0 0B0", "worker 0 waits forever at 0R0: it needs 0F0, which is later in its own order"),
        ("0F0 0W0 0I0", "worker 0 waits forever at 0W0: it needs 0I0, which is later in its own order"),
    ],
)
def test_what_is_wrong_is_named(text, expected):
    assert messages(schedule_of(text)) == [expected]


def test_an_action_on_the_wrong_worker():
    schedule = schedule_of("0F0 1F0 1B0 0B0\n1F1 0F1 0B1 1B1")
    assert "1F0 is in the order of worker 0, but stage 1 is on worker 1" in messages(schedule)


def test_a_cyclic_wait_names_both_sides():
    # 0 wants the gradient of micro-batch 1 first, 1 the value of micro-batch 1 only after the backward of 0.
    schedule = schedule_of("0F0 0B0 0F1 0B1\n1F0 1F1 1B0 1B1")
    assert messages(schedule) == [
        "worker 0 waits forever at 0B0: it needs 1B0, which worker 1 never reaches",
        "worker 1 waits forever at 1F1: it needs 0F1, which worker 0 never reaches",
    ]
    with pytest.raises(ScheduleError, match=r"'test' cannot be executed: worker 0 waits .* \(and 1 more\)$"):
        validate(schedule).raise_if_invalid()
    violation = validate(schedule).violations[0]
    assert (violation.worker, violation.action) == (0, Action("B", 0, 0))


def test_inference_has_no_backwards():
    assert validate(forward_only(3, 4)).ok
    short = Schedule("short", (0, 1), ((Action("F", 0, 0),), (Action("F", 1, 1),)), inference=True)
    assert messages(short) == ["0F1 is missing in the order of worker 0", "1F0 is missing in the order of worker 1"]
    with pytest.raises(ValueError, match=r"kind must be one of F, .* since the schedule is for inference"):
        Schedule("both", (0,), ((Action("F", 0, 0), Action("B", 0, 0)),), inference=True)


def test_loss_outside_needs_all_forwards_first():
    one_f_one_b = schedule_of("0F0 0F1 0B0 0B1\n1F0 1B0 1F1 1B1")
    assert validate(one_f_one_b).ok
    assert "worker 1 waits forever at 1B0: it needs the loss" in messages(one_f_one_b, loss_outside=True)[0]
    assert validate(fill_drain(3, 3), loss_outside=True).ok


def test_the_cause_of_a_wait_is_named_before_its_consequences():
    schedule = schedule_of("0F0 0F1 0B0 0B1\n1F0 1B1 1F1 1B0")
    with pytest.raises(ScheduleError, match=r"worker 1 waits forever at 1B1: it needs 1F1, .*own order \(and 1 more\)"):
        validate(schedule).raise_if_invalid()


def test_what_waits_in_a_channel_is_named():
    crossed = "0F0 0F1 0SEND_F1 0SEND_F0 0RECV_B0 0RECV_B1 0B0 0B1\n"
    crossed += "1RECV_F0 1RECV_F1 1F0 1B0 1SEND_B0 1F1 1B1 1SEND_B1"
    assert not messages(schedule_of(crossed))
    assert messages(schedule_of(crossed), channel="pair")[0] == (
        "worker 1 waits forever at 1F0: it needs 1RECV_F0, which waits in a queue behind transfers that the other side "
        "posts later; with_communication(..., channel='pair') makes matching orders"
    )
    early = "0F0 0RECV_B0 0SEND_F0 0B0\n1RECV_F0 1F0 1B0 1SEND_B0"
    assert not messages(schedule_of(early), channel="pair")
    assert "1RECV_F0, which waits in a queue" in messages(schedule_of(early), channel="worker")[0]
