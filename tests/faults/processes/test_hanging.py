"""A rank that hangs is found by its heartbeat, or by how long an action takes; one that is slow is left alone."""

import signal

import pytest

from tests.faults.processes.training import DETECT, PATIENCE, Failing, assert_clean_exit

FOUND = DETECT + 1.0


@pytest.mark.parametrize(
    ("fault", "ranks"),
    [
        ("rank=1,step=1,action=B,micro_batch=3,kind=stop", 3),
        ("rank=0,step=2,action=F,micro_batch=1,kind=hold_gil,seconds=20", 2),
    ],
)
def test_a_silent_rank_is_lost(failing: Failing, fault: str, ranks: int) -> None:
    hung, others = int(fault[5]), set(range(ranks)) - {int(fault[5])}
    outcome = failing(ranks, fault, but=[hung], init={"detect": DETECT})
    assert outcome.raised.keys() == others, [each.errors for each in outcome.ended]
    for rank, error in outcome.raised.items():
        assert (error.type, error.rank, error.kind) == ("PipelineError", hung, "lost"), error.text
        assert f"rank {hung} (stage" in error.text
        assert "last action: " in error.text or "last seen " in error.text  # half a second before, perhaps
        assert outcome.ended[rank].errors.count("no heartbeat for") == 1, outcome.ended[rank].errors
        assert outcome.ended[rank].code == 72
        assert_clean_exit(outcome.ended[rank])
    assert outcome.seconds <= FOUND * PATIENCE


@pytest.mark.parametrize("fault", ["rank=1,step=1,action=F,micro_batch=1,kind=hang"])
def test_a_stuck_rank_tells_where_and_ends(failing: Failing, fault: str) -> None:
    """An endless loop lets heartbeats through: only a bound on the time of an action finds it."""
    outcome = failing(3, fault, init={"detect": DETECT, "action_timeout": DETECT})
    for rank in (0, 2):
        error = outcome.raised[rank]
        assert (error.rank, error.kind, error.where) == (1, "stuck", "F of stage 1, micro-batch 1"), error.text
        assert "rank 1 (stage 1) is stuck: it has been busy for" in error.text
        assert "in strike" in (error.traceback_text or ""), error.traceback_text
        assert outcome.ended[rank].code == 71
        assert_clean_exit(outcome.ended[rank])
    assert outcome.seconds <= FOUND * PATIENCE
    # Nobody can end the loop, so the process is ended.
    assert outcome.ended[1].code == 70, outcome.ended[1].errors
    assert "most recent call first" in outcome.ended[1].errors
    assert "its present action does not come to an end" in outcome.ended[1].errors


def test_who_waits_for_a_rank_that_died_cannot_be_held_up_by_a_layer(failing: Failing) -> None:
    """Rank 1 is in a layer that takes an hour while rank 0 dies."""
    faults = (
        "rank=1,step=1,action=F,micro_batch=0,kind=sleep,seconds=3600;rank=0,step=1,action=F,micro_batch=1,kind=kill"
    )
    outcome = failing(2, faults, init={"detect": DETECT})
    assert outcome.ended[0].code == -signal.SIGKILL
    assert outcome.ended[1].code == 72, outcome.ended[1].errors
    assert "rank 0 (stage 0)" in outcome.ended[1].errors


@pytest.mark.parametrize("action", ["F", "optimizer"])
def test_a_slow_rank_is_not_lost(failing: Failing, action: str) -> None:
    slow = f"rank=1,step=1,action={action},micro_batch=1,kind=sleep,seconds={2 * DETECT}"
    fault = slow if action == "F" else slow.replace("micro_batch=1,", "")
    outcome = failing(2, fault, init={"detect": DETECT})
    assert not outcome.raised
    assert [each.code for each in outcome.ended] == [0, 0]
    losses = [each.result["losses"] for each in outcome.ended]
    assert losses[0] == losses[1]
    assert len(losses[0]) == 4
