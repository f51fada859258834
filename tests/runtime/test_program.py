import pytest

from pipework.runtime.program import Program
from pipework.schedule import (
    Action,
    Schedule,
    build,
    fill_drain,
    forward_only,
    interleaved_1f1b,
    one_forward_one_backward,
    with_offload,
    with_recompute,
)


def schedule(*orders: str) -> Schedule:
    return Schedule("own", tuple(range(len(orders))), tuple(tuple(map(Action.parse, line.split())) for line in orders))


def test_forwards_and_others_are_the_whole_in_the_same_order() -> None:
    program = Program.of(with_recompute(one_forward_one_backward(2, 3), 2, loss_outside=True))
    text = [[" ".join(map(str, order)) for order in orders] for orders in (program.forwards, program.others)]
    assert text == [["0F0 0F1 0F2", "1F0 1F1 1F2"], ["0R0 0B0 0R1 0B1 0B2", "1R0 1B0 1R1 1B1 1B2"]]
    assert program.whole is program.schedule.orders


@pytest.mark.parametrize(
    ("each", "outside"),
    [
        (one_forward_one_backward(2, 4), False),
        (interleaved_1f1b(2, 4, 2), False),
        (with_recompute(one_forward_one_backward(3, 2), 1), False),
        (one_forward_one_backward(3, 1), True),  # one micro-batch alone has no other order
        (one_forward_one_backward(1, 1), True),
    ],
)
def test_where_the_loss_may_be(each: Schedule, outside: bool) -> None:
    assert Program.of(each).loss_may_be_outside == outside


@pytest.mark.parametrize(
    ("each", "message"),
    [
        (schedule("0B0 0F0"), "0B0"),
        (schedule("0F0"), "0B0"),
        (forward_only(2, 3), "'forward-only' has no backwards: give one that trains"),
        (schedule("0F0 0I0"), "0W0 is missing in the order of worker 0"),
        (schedule("0F0 0F1 0I0 0I1 0W1 0W0"), "in another order than 0, 1, 2"),
        (schedule("0F0 0B0 0REDUCE_GRAD"), r"has communication or reduction actions \(0REDUCE_GRAD\)"),
        (schedule("0F0 0F1 0B1 0B0"), "in another order than 0, 1, 2"),
    ],
)
def test_what_cannot_run_is_refused(each: Schedule, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Program.of(each)


def test_across_processes_only_those_transfers_of_skips_are_there_on_which_something_is_sent() -> None:
    program = Program.of(fill_drain(4, 1)).across([(0, 2), (0, 3), (3, 2), (2, 0)], reduces=False)
    far = {str(action) for order in program.whole for action in order if "@" in str(action)}
    assert far == {"0SEND_F0@2", "2RECV_F0@0", "0SEND_F0@3", "3RECV_F0@0", "2SEND_B0@0", "0RECV_B0@2"}


def test_the_share_of_a_process_in_what_its_host_keeps(monkeypatch: pytest.MonkeyPatch) -> None:
    program = Program.of(with_offload(build("1f1b", workers=3, chunks=6)))
    assert program.away_at_once == [3, 0, 0]
    for processes, share in ((1, 1), (3, 1), (6, 0.5)):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", str(processes))
        assert [program.host_share([worker]) for worker in range(3)] == [share, 0, 0]
        assert program.host_share(range(3)) == 1 / processes
