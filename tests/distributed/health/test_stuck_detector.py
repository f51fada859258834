"""The detector of hangs, with a clock that the test sets."""

import pytest

from pipework.distributed.health.progress import Progress
from pipework.distributed.health.status import Call
from pipework.distributed.health.stuck_detector import StuckDetector
from pipework.schedule import Action

CALL = Call().begun("training step")


@pytest.mark.parametrize(("waiting", "limit"), [(False, 3.0), (True, 6.0)])
def test_an_action_that_takes_too_long_is_stuck(waiting: bool, limit: float) -> None:
    progress = Progress()
    progress.action, progress.waiting = Action("B", 0, 2), waiting
    detector = StuckDetector(0, "rank 0", 3.0, longest=1.0)
    seen = [detector.check(second / 2, progress, CALL) for second in range(20)]
    first = next(index for index, failure in enumerate(seen) if failure is not None)
    assert (first - 1) / 2 == limit
    failure = seen[first]
    assert failure is not None
    assert "with one action, B of stage 0, micro-batch 2" in failure.text
    assert "test_an_action_that_takes_too_long_is_stuck" in failure.traceback_text


def test_who_waits_for_a_rank_that_has_not_come_to_the_call_is_not_stuck() -> None:
    progress = Progress()
    detector = StuckDetector(0, "rank 0", 3.0, longest=1.0)
    with progress.waits():
        assert all(detector.check(second / 2, progress, CALL, all_entered=False) is None for second in range(100))
        later = [detector.check(50 + second / 2, progress, CALL) for second in range(14)]
    assert [failure is not None for failure in later].index(True) == 12
    assert not progress.waiting


def test_who_has_waited_for_long_has_not_been_busy() -> None:
    """As when a connection is closed at last, and what that means takes a moment."""
    progress = Progress()
    detector = StuckDetector(0, "rank 0", 3.0, longest=1.0)
    with progress.waits():
        assert all(detector.check(second / 2, progress, CALL) is None for second in range(10))
    later = [detector.check(5 + second / 2, progress, CALL) for second in range(10)]
    assert [failure is not None for failure in later].index(True) == 7


def test_progress_is_not_stuck() -> None:
    progress = Progress()
    detector = StuckDetector(0, "rank 0", 3.0, longest=1.0)
    for second in range(100):
        progress.count += second % 4 == 0
        assert detector.check(second / 2, progress, CALL) is None
    for second in range(100, 200):  # nor is anything outside of calls
        assert detector.check(second / 2, progress, CALL.ended()) is None
