"""The detectors of failures and hangs, with heartbeats and a clock that the test sets."""

import copy
import itertools
import random
from collections.abc import Iterator
from typing import Any

import pytest

from pipework.distributed.health.failure_detector import (
    NO_CALL,
    DetectionTimes,
    FailureDetector,
    ProcessCalls,
    Progress,
    StuckDetector,
)
from pipework.distributed.health.status import Beat, Call
from pipework.schedule import Action

TIMES = DetectionTimes(beat=0.5, detect=10.0, poll=0.1, action_timeout=None)
CALL = Call().begun("training step")


def beat(number: int, *, left: bool = False, call: Call = CALL) -> Beat:
    return Beat(number, left, call, "F of stage 1, micro-batch 0", 4711, "node1")


def make_detector(ranks: int = 2) -> FailureDetector:
    calls = ProcessCalls()
    for _ in range(2):
        calls.begin(calls.add())  # it is in the first call of the second pipe
    return FailureDetector(0, {rank: f"rank {rank}" for rank in range(ranks)}, TIMES, calls)


def found(detector: FailureDetector, beats: dict[int, Beat | None], call: Call = CALL, now: float = 0.0) -> Any:
    """A failure that this check finds."""
    failure = detector.check(now, beats, call)
    assert failure is not None
    return failure


def first_of(detector: FailureDetector, beats: dict[int, Beat | None]) -> Any:
    """The first failure of many checks, one every half second."""
    return next(filter(None, (detector.check(second / 2, beats, CALL) for second in range(1, 200))))


def test_silence_is_a_failure_after_detect() -> None:
    detector = make_detector()
    now = 100.0
    assert detector.check(now, {1: beat(1)}, CALL) is None
    while now < 109.9:
        now += 0.5
        assert detector.check(now, {1: beat(1)}, CALL) is None
    assert detector.any_late
    assert found(detector, {1: beat(1)}, now=110.1).text == (
        "rank 1 lost: no heartbeat for 10.1 s; last action: F of stage 1, micro-batch 0, in call 1 (training step) "
        "(pid 4711 on node1)"
    )


@pytest.mark.parametrize(
    ("call", "place"),
    [
        (Call(), "last seen after call 0"),
        (CALL, "last action: F of stage 1, micro-batch 0, in call 1 (training step)"),
        (CALL.ended(), "last seen after call 1 (training step)"),
    ],
)
def test_last_seen(call: Call, place: str) -> None:
    detector = make_detector()
    assert detector.last_seen(1) == "no heartbeat of it was received"
    detector.check(0.0, {1: beat(1, call=call)}, CALL)
    assert detector.last_seen(1) == f"{place} (pid 4711 on node1)"


def test_a_sign_of_life_at_the_last_moment() -> None:
    detector = make_detector()
    for number in range(10):
        for step in range(19):
            assert detector.check(number * 9.5 + step * 0.5, {1: beat(number)}, CALL) is None


def test_who_has_not_come_yet_is_looked_for_often() -> None:
    detector = make_detector(3)
    assert (detector.any_late, detector.has_seen_all) == (True, False)
    detector.check(0.0, {1: beat(1), 2: None}, CALL)
    assert (detector.any_late, detector.has_seen_all) == (True, False)
    detector.check(0.1, {1: beat(1), 2: beat(1)}, CALL)
    assert (detector.any_late, detector.has_seen_all) == (False, True)


def test_own_absence_does_not_count_against_others() -> None:
    detector = make_detector()
    detector.check(0.0, {1: beat(1)}, CALL)
    assert detector.check(1000.0, {1: beat(1)}, CALL) is None
    assert detector.check(2000.0, {1: beat(1)}, CALL) is None
    assert detector.check(2000.5, {1: beat(2)}, CALL) is None
    assert not detector.any_late


def test_the_most_silent_rank_is_named() -> None:
    detector = make_detector(3)
    detector.check(0.0, {1: beat(1), 2: beat(1)}, CALL)
    assert first_of(detector, {1: beat(2), 2: beat(1)}).rank == 2


def test_who_has_left_may_be_silent() -> None:
    detector = make_detector()
    assert not any(
        detector.check(second / 2, {1: beat(1, left=True, call=CALL.ended())}, CALL) for second in range(100)
    )


def test_outside_of_calls_nobody_is_missed() -> None:
    mine = CALL.ended().begun("training step")
    assert make_detector().check(0.0, {1: beat(1, left=True)}, mine.ended()) is None
    assert found(make_detector(), {1: beat(1, left=True)}, mine).kind == "left"


def test_a_rank_that_ran_out_of_data() -> None:
    """It may leave, or go on to something else."""
    hint = "give all ranks of a pipe the same batches: a DataLoader with sampler=pipe.sampler(dataset)"
    clipped = CALL.ended().begun("clip_grad_norm_")
    mine = clipped.ended().begun("training step")
    left = beat(1, left=True, call=CALL.ended())
    assert found(make_detector(), {1: left}, mine).text == (
        "rank 1 left after call 1 (training step), and rank 0 is in call 3 (training step). If one has run out of data "
        f"before the other, {hint}"
    )
    assert hint not in found(make_detector(), {1: left._replace(reason="LookupError: no")}, mine).text
    for here, there, may_lack_data in (
        (mine, clipped.ended().begun("evaluation"), True),
        (clipped, CALL.ended().begun("checkpoint"), False),
    ):
        astray = found(make_detector(), {1: beat(1, call=there)}, here)
        assert astray.kind == "disagreement"
        assert astray.text.endswith(hint) == may_lack_data


def test_all_entered() -> None:
    detector = make_detector(3)
    assert not detector.all_entered(1)
    second = CALL.ended().begun("training step")
    detector.check(0.0, {1: beat(1), 2: beat(1, call=second)}, CALL)
    assert detector.all_entered(1)
    assert not detector.all_entered(2)


THERE = (1, 2)
"""A call that this rank has not begun, of its first pipe."""


def elsewhere(number: int, *, place: tuple[int, int] = THERE) -> Beat:
    return beat(number, call=Call())._replace(place=place)


def test_ranks_that_call_two_pipes_in_another_order() -> None:
    failure = found(make_detector(), {1: elsewhere(1)})
    assert failure.kind == "disagreement"
    assert failure.text == (
        "rank 0 waits in call 1 of pipe 2, and rank 1 in call 2 of pipe 1, which rank 0 has not begun (pipes are "
        "numbered in the order in which they were made): call all pipes in the same order on all ranks"
    )
    fine = [elsewhere(1, place=NO_CALL), elsewhere(2, place=(1, 1)), beat(4)._replace(place=THERE)]
    assert not any(make_detector().check(0.0, {1: each}, CALL) for each in fine)
    assert make_detector().check(0.0, {1: elsewhere(6)}, CALL.ended()) is None


class Rank:
    """Makes the calls of an order of pipes, and sends a heartbeat for each pipe."""

    def __init__(self, order: list[int]) -> None:
        self.calls, self.of_pipe = ProcessCalls(), {}
        for _ in range(3):
            self.of_pipe[self.calls.add()] = Call()
        self.moments = self.steps(order)

    def steps(self, order: list[int]) -> Iterator[None]:
        for pipe in order:
            self.of_pipe[pipe] = self.of_pipe[pipe].begun("training step")
            self.calls.begin(pipe)
            yield
            self.of_pipe[pipe] = self.of_pipe[pipe].ended()
            self.calls.end()
            yield

    def accused(self, other: "Rank") -> list[Any]:
        """What the monitors of the pipes find at a heartbeat of another rank."""
        return [
            FailureDetector(0, {0: "rank 0", 1: "rank 1"}, TIMES, self.calls).check(
                0.0, {1: beat(1, call=other.of_pipe[pipe])._replace(place=other.calls.present)}, call
            )
            for pipe, call in self.of_pipe.items()
        ]


def test_ranks_that_call_pipes_in_the_same_order_accuse_nobody_however_far_one_is_ahead() -> None:
    chosen = random.Random(0)
    order = [chosen.choice([1, 2, 3]) for _ in range(60)]
    ranks = [Rank(order), Rank(order)]
    for _ in range(100):
        next(chosen.choice(ranks).moments)
        assert not any(one.accused(other) != [None] * 3 for one, other in itertools.permutations(ranks))


def test_a_copy_of_the_calls_is_of_another_process() -> None:
    """As where a mesh is copied."""
    calls = ProcessCalls()
    calls.begin(calls.add())
    assert copy.deepcopy(calls).present == NO_CALL


# ---- times, and an action of this rank ------------------------------------------------------------------------------

GOOD = {"beat": 0.5, "detect": 10.0, "poll": 0.1, "action_timeout": None}
STUCK = DetectionTimes(**{**GOOD, "action_timeout": 3.0})


def checked(detector: StuckDetector, progress: Progress, begin: float, **entered: bool) -> list[Any]:
    """What twenty checks find, one every half second."""
    return [detector.check(begin + second / 2, progress, CALL, **entered) for second in range(20)]


def first_stuck(found: list[Any]) -> int:
    return [failure is not None for failure in found].index(True)


@pytest.mark.parametrize(("waiting", "limit"), [(False, 3.0), (True, 6.0)])
def test_an_action_that_takes_too_long_is_stuck(waiting: bool, limit: float) -> None:
    progress = Progress()
    progress.action, progress.waiting = Action("B", 0, 2), waiting
    found = checked(StuckDetector(0, "rank 0", STUCK), progress, 0.0)
    assert first_stuck(found) == 2 * limit + 1
    failure = found[first_stuck(found)]
    assert "with one action, B of stage 0, micro-batch 2" in failure.text
    assert "in checked" in failure.traceback_text


def test_who_waits_for_a_rank_that_has_not_come_to_the_call_is_not_stuck() -> None:
    progress, detector = Progress(), StuckDetector(0, "rank 0", STUCK)
    with progress.waits():
        assert not any(checked(detector, progress, 0.0, all_entered=False))
        assert first_stuck(checked(detector, progress, 10.0)) == 12


def test_who_has_waited_for_long_has_not_been_busy() -> None:
    """As when a connection is closed at last, and what that means takes a moment."""
    progress, detector = Progress(), StuckDetector(0, "rank 0", STUCK)
    with progress.waits():
        assert [detector.check(second / 2, progress, CALL) for second in range(10)] == [None] * 10
    assert first_stuck(checked(detector, progress, 5.0)) == 7


def test_progress_is_not_stuck() -> None:
    progress, detector = Progress(), StuckDetector(0, "rank 0", STUCK)
    for second in range(100):
        progress.count += second % 4 == 0
        assert detector.check(second / 2, progress, CALL) is None
    assert detector.check(60.0, progress, CALL.ended()) is None  # nor is anything outside of calls
