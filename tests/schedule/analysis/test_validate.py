import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipework.schedule import (
    Action,
    Schedule,
    ScheduleError,
    check,
    fill_drain,
    forward_only,
    simulate,
    validate,
    with_recompute,
)


def schedule_of(text, placement=None):
    orders = [tuple(map(Action.parse, line.split())) for line in text.strip().splitlines()]
    return Schedule("test", placement if placement is not None else tuple(range(len(orders))), tuple(orders))


def messages(schedule, **options):
    return [violation.message for violation in validate(schedule, **options).violations]


def brute_force_runs(schedule):
    """Execute naively: any worker whose next action has all it needs goes on; rules as they are told in words."""
    wanted = {(stage, micro) for stage in range(schedule.stages) for micro in range(schedule.micro_batches)}
    everything = [action for order in schedule.orders for action in order]
    if any(schedule.placement[action.stage] != w for w, order in enumerate(schedule.orders) for action in order):
        return False
    if len(everything) != len(set(everything)):
        return False
    of = {kind: {(s, m) for k, s, m, _ in everything if k == kind} for kind in "FBIWR"}
    if of["F"] != wanted or of["I"] != of["W"] or of["B"] & of["I"] or of["B"] | of["I"] != wanted:
        return False
    done = set()
    at = [0] * schedule.workers
    moved = True
    while moved:
        moved = False
        for worker, order in enumerate(schedule.orders):
            if at[worker] == len(order):
                continue
            kind, s, m, _ = order[at[worker]]
            last = s == schedule.stages - 1
            free = {
                "F": s == 0 or ("F", s - 1, m) in done,
                "R": ("F", s, m) in done,
                "W": ("I", s, m) in done,
            }
            free["B"] = free["I"] = (
                ("F", s, m) in done
                and ((s, m) not in of["R"] or ("R", s, m) in done)
                and (last or ("B", s + 1, m) in done or ("I", s + 1, m) in done)
            )
            if free[kind]:
                done.add((kind, s, m))
                at[worker] += 1
                moved = True
    return all(position == len(order) for position, order in zip(at, schedule.orders, strict=True))


@st.composite
def mutated_schedules(draw):
    workers, micro_batches = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    schedule = with_recompute(fill_drain(workers, micro_batches), draw(st.integers(0, micro_batches)))
    orders = [list(order) for order in schedule.orders]
    if draw(st.booleans()):  # split some backwards
        chosen = draw(st.integers(0, micro_batches))
        orders = [
            [
                part
                for k, s, m, _ in order
                for part in ([Action("I", s, m), Action("W", s, m)] if k == "B" and m < chosen else [Action(k, s, m)])
            ]
            for order in orders
        ]
    for _ in range(draw(st.integers(0, 3))):
        order = draw(st.sampled_from(orders))
        if not order:
            continue
        here, there = (draw(st.integers(0, len(order) - 1)) for _ in range(2))
        match draw(st.sampled_from(["drop", "swap", "duplicate", "move", "change"])):
            case "drop":
                del order[here]
            case "swap":
                order[here], order[there] = order[there], order[here]
            case "duplicate":
                order.insert(there, order[here])
            case "move":
                draw(st.sampled_from(orders)).append(order.pop(here))
            case "change":
                order[here] = order[here]._replace(kind=draw(st.sampled_from("FBIWR")))
    if not any(orders):
        orders[0].append(Action("F", 0, 0))
    return Schedule("mutated", schedule.placement, tuple(map(tuple, orders)))


@settings(max_examples=400, deadline=None)
@given(mutated_schedules())
def test_refused_if_and_only_if_a_naive_run_fails(schedule):
    validation = validate(schedule)
    assert validation.ok == brute_force_runs(schedule), validation.violations
    if validation.ok:
        check(schedule)
        simulate(schedule)
    else:
        with pytest.raises(ScheduleError, match="schedule 'mutated' cannot be executed"):
            check(schedule)
        with pytest.raises(ScheduleError):
            simulate(schedule)


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


def test_a_gradient_may_come_from_an_input_gradient_half():
    assert validate(schedule_of("0F0 0B0\n1F0 1I0 1W0")).ok
    assert messages(schedule_of("0B0 0F0\n1F0 1I0 1W0"))[1].endswith("it needs 0F0, which worker 0 never reaches")


def test_several_stages_on_a_worker():
    assert validate(schedule_of("0F0 3F0 3B0 0B0\n1F0 2F0 2B0 1B0", placement=(0, 1, 1, 0))).ok
    assert not validate(schedule_of("3F0 0F0 3B0 0B0\n1F0 2F0 2B0 1B0", placement=(0, 1, 1, 0))).ok


def test_inference_has_no_backwards():
    assert validate(forward_only(3, 4)).ok
    short = Schedule("short", (0, 1), ((Action("F", 0, 0),), (Action("F", 1, 1),)), inference=True)
    assert messages(short) == [
        "0F1 is missing in the order of worker 0",
        "1F0 is missing in the order of worker 1",
    ]
    with pytest.raises(ValueError, match=r"kind must be one of F, .* since the schedule is for inference"):
        Schedule("both", (0,), ((Action("F", 0, 0), Action("B", 0, 0)),), inference=True)


def test_loss_outside_needs_all_forwards_first():
    one_f_one_b = schedule_of("0F0 0F1 0B0 0B1\n1F0 1B0 1F1 1B1")
    assert validate(one_f_one_b).ok
    assert "worker 1 waits forever at 1B0: it needs the loss" in messages(one_f_one_b, loss_outside=True)[0]
    assert validate(fill_drain(3, 3), loss_outside=True).ok


def test_the_cause_of_a_wait_is_named_before_its_consequences():
    orders = ("0F0 0F1 0B0 0B1", "1F0 1B1 1F1 1B0")
    schedule = Schedule("mine", (0, 1), tuple(tuple(map(Action.parse, order.split())) for order in orders))
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


def test_memory_limits_of_an_order_that_cannot_run_are_not_looked_at():
    backwards = Schedule("backwards", (0,), ((Action("B", 0, 0), Action("F", 0, 0)),))
    assert [text.partition(":")[0] for text in messages(backwards, memory_limit=0)] == ["worker 0 waits forever at 0B0"]


def test_what_goes_the_other_way_is_in_another_channel():
    crossed = "0F0 0RECV_B0 0SEND_F0 0F1 0SEND_F1 0RECV_B1 0B0 0B1\n"
    crossed += "1RECV_F1 1RECV_F0 1F0 1F1 1B0 1SEND_B0 1B1 1SEND_B1"
    assert not messages(schedule_of(crossed))
    for channel in ("pair", "worker"):
        first, second = messages(schedule_of(crossed), channel=channel)
        assert f"posts later; with_communication(..., channel={channel!r})" in first
        assert second == "worker 0 waits forever at 0B0: it needs 0RECV_B0, but worker 1 never reaches 1SEND_B0"
