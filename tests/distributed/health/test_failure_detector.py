"""Judging by a clock that stands still unless it is told to go on."""

import pytest

from pipework.distributed.health.failure_detector import FailureDetector, Times
from pipework.distributed.health.progress import Overdue, Progress
from pipework.distributed.health.status import Beat, Call, describe_action
from pipework.schedule import Action

TIMES = Times(beat=0.5, detect=10.0, poll=0.1, join=60.0, action_timeout=None)
CALL = Call().begun("training step")


def beat(number: int, *, left: bool = False, call: Call = CALL) -> Beat:
    return Beat(number, left, call, "F of stage 1, micro-batch 0", 4711, "node1")


def detector(ranks: int = 2) -> FailureDetector:
    return FailureDetector(0, [f"rank {rank}" for rank in range(ranks)], TIMES)


def test_silence_is_a_failure_after_detect() -> None:
    judging = detector()
    now = 100.0
    assert judging.see(now, {1: beat(1)}, CALL) is None
    while now < 109.9:
        now += 0.5
        assert judging.see(now, {1: beat(1)}, CALL) is None
    assert judging.suspicious
    failure = judging.see(110.1, {1: beat(1)}, CALL)
    assert failure is not None
    assert failure.text == (
        "rank 1 lost: no sign of life for 10.1 s; last action: F of stage 1, micro-batch 0 (pid 4711 on node1)"
    )


@pytest.mark.parametrize(
    ("call", "place"),
    [
        (Call(), "last seen before its first call"),
        (CALL, "last action: F of stage 1, micro-batch 0"),
        (CALL.ended(), "last seen between calls, after its 1st training step"),
        (CALL.ended().begun("training step").ended(), "last seen between calls, after its 2nd training step"),
        (
            CALL.ended().begun("clip_grad_norm_").ended(),
            "last seen between calls, after its 1st call of clip_grad_norm_",
        ),
    ],
)
def test_last_words(call: Call, place: str) -> None:
    judging = detector()
    assert judging.last_words(1) == "no sign of life was seen of it"
    judging.see(0.0, {1: beat(1, call=call)}, CALL)
    assert judging.last_words(1) == f"{place} (pid 4711 on node1)"


def test_last_words_before_the_first_action() -> None:
    judging = detector()
    judging.see(0.0, {1: beat(1)._replace(action=describe_action(None))}, CALL)
    assert judging.last_words(1) == "last seen at the beginning of its 1st training step (pid 4711 on node1)"


def test_a_sign_of_life_at_the_last_moment() -> None:
    judging = detector()
    for number in range(10):
        for step in range(19):
            assert judging.see(number * 9.5 + step * 0.5, {1: beat(number)}, CALL) is None


def test_who_has_not_come_yet_is_looked_for_often() -> None:
    judging = detector(3)
    assert judging.suspicious
    assert not judging.has_seen_all
    judging.see(0.0, {1: beat(1), 2: None}, CALL)
    assert judging.suspicious
    assert not judging.has_seen_all
    judging.see(0.1, {1: beat(1), 2: beat(1)}, CALL)
    assert not judging.suspicious
    assert judging.has_seen_all


def test_own_absence_does_not_count_against_others() -> None:
    judging = detector()
    judging.see(0.0, {1: beat(1)}, CALL)
    assert judging.see(1000.0, {1: beat(1)}, CALL) is None
    assert judging.see(2000.0, {1: beat(1)}, CALL) is None
    assert judging.see(2000.5, {1: beat(2)}, CALL) is None
    assert not judging.suspicious


def test_without_a_valid_beat_a_rank_is_silent() -> None:
    judging = detector()
    failures = [judging.see(second / 2, {1: None}, CALL) for second in range(200)]
    first = next(failure for failure in failures if failure is not None)
    assert first.text == "rank 1 did not appear within 60.5 s"


def test_the_most_silent_rank_is_named() -> None:
    judging = detector(3)
    judging.see(0.0, {1: beat(1), 2: beat(1)}, CALL)
    judging.see(0.5, {1: beat(2), 2: beat(1)}, CALL)
    failures = [judging.see(1 + second / 2, {1: beat(2), 2: beat(1)}, CALL) for second in range(30)]
    first = next(failure for failure in failures if failure is not None)
    assert first.rank == 2


def test_who_has_left_may_be_silent() -> None:
    judging = detector()
    assert not any(judging.see(second / 2, {1: beat(1, left=True, call=CALL.ended())}, CALL) for second in range(100))


def test_outside_of_calls_nobody_is_missed() -> None:
    mine = CALL.ended().begun("training step")
    assert detector().see(0.0, {1: beat(1, left=True)}, mine.ended()) is None
    failure = detector().see(0.0, {1: beat(1, left=True)}, mine)
    assert failure is not None
    assert failure.kind == "left"


def test_a_rank_that_ran_out_of_data() -> None:
    """It may leave, or go on to something else."""
    mine = CALL.ended().begun("clip_grad_norm_").ended().begun("training step")
    hint = "give every rank the same number of batches: drop_last=True, or a DistributedSampler"
    left = detector().see(0.0, {1: beat(1, left=True, call=CALL.ended())}, mine)
    assert left is not None
    assert left.text == (
        "rank 1 left after 1 training step, and rank 0 is in its 2nd training step (2 training steps, 1 call of "
        f"clip_grad_norm_). If one has run out of data before the other, {hint}"
    )
    failed = beat(1, left=True, call=CALL.ended())._replace(reason="LookupError: no")
    other = detector().see(0.0, {1: failed}, mine)
    assert other is not None
    assert hint not in other.text
    theirs = CALL.ended().begun("clip_grad_norm_").ended().begun("evaluation")
    astray = detector().see(0.0, {1: beat(1, call=theirs)}, mine)
    assert astray is not None
    assert astray.kind == "disagreement"
    assert astray.text.endswith(hint)
    theirs = CALL.ended().begun("checkpoint")
    astray = detector().see(0.0, {1: beat(1, call=theirs)}, CALL.ended().begun("clip_grad_norm_"))
    assert astray is not None
    assert hint not in astray.text


def test_words_for_calls() -> None:
    call = Call()
    assert (call.total(), call.current()) == ("no call", "its 0th call")
    for _ in range(12):
        call = call.begun("training step").ended()
    assert call.current() == "its 12th training step"
    assert [call.kind(number) for number in (4, 5, 12, 13)] == [None, "training step", "training step", None]
    for _ in range(3):
        call = call.begun("clip_grad_norm_").ended()
    assert call.total() == "12 training steps, 3 calls of clip_grad_norm_"
    assert call.current() == "its 3rd call of clip_grad_norm_"
    assert [Call(counts={"step": n}, recent=("step",)).current() for n in (2, 3, 21, 111)] == [
        "its 2nd step",
        "its 3rd step",
        "its 21st step",
        "its 111th step",
    ]


@pytest.mark.parametrize(("waiting", "limit"), [(False, 3.0), (True, 6.0)])
def test_an_action_is_overdue(waiting: bool, limit: float) -> None:
    progress = Progress()
    progress.action, progress.waiting = Action("B", 0, 2), waiting
    overdue = Overdue(0, "rank 0", 3.0, longest=1.0)
    seen = [overdue.look(second / 2, progress, CALL) for second in range(20)]
    first = next(index for index, failure in enumerate(seen) if failure is not None)
    assert (first - 1) / 2 == limit
    failure = seen[first]
    assert failure is not None
    assert "with one action, B of stage 0, micro-batch 2" in failure.text
    assert "test_an_action_is_overdue" in failure.traceback_text


def test_who_waits_for_a_rank_that_has_not_come_to_the_call_is_not_stuck() -> None:
    progress = Progress()
    overdue = Overdue(0, "rank 0", 3.0, longest=1.0)
    with progress.waits():
        assert all(overdue.look(second / 2, progress, CALL, all_came=False) is None for second in range(100))
        later = [overdue.look(50 + second / 2, progress, CALL) for second in range(14)]
    assert [failure is not None for failure in later].index(True) == 12
    assert not progress.waiting


def test_who_has_waited_for_long_has_not_been_busy() -> None:
    """As when a connection is closed at last, and what that means takes a moment."""
    progress = Progress()
    overdue = Overdue(0, "rank 0", 3.0, longest=1.0)
    with progress.waits():
        assert all(overdue.look(second / 2, progress, CALL) is None for second in range(10))
    later = [overdue.look(5 + second / 2, progress, CALL) for second in range(10)]
    assert [failure is not None for failure in later].index(True) == 7


def test_all_came() -> None:
    judging = detector(3)
    assert not judging.all_came(1)
    second = CALL.ended().begun("training step")
    judging.see(0.0, {1: beat(1), 2: beat(1, call=second)}, CALL)
    assert judging.all_came(1)
    assert not judging.all_came(2)


def test_progress_is_not_overdue() -> None:
    progress = Progress()
    overdue = Overdue(0, "rank 0", 3.0, longest=1.0)
    for second in range(100):
        progress.count += second % 4 == 0
        assert overdue.look(second / 2, progress, CALL) is None
    for second in range(100, 200):  # nor is anything outside of calls
        assert overdue.look(second / 2, progress, CALL.ended()) is None
