"""Counting the calls of all pipes of a process, and comparing those of two."""

import copy
import random

from pipework.distributed.health.failure_detector import NO_CALL, ProcessCalls


def calls_of(count: int) -> ProcessCalls:
    calls = ProcessCalls()
    assert [calls.add() for _ in range(count)] == list(range(1, count + 1))
    return calls


def test_who_makes_the_same_calls_later_waits_for_what_it_has_not_begun() -> None:
    chosen = random.Random(0)
    ahead, behind = calls_of(3), calls_of(3)
    behind.begin(1)
    ahead.begin(1)
    for _ in range(40):
        assert not ahead.waits_for(behind.present)
        ahead.end()
        assert not ahead.waits_for(behind.present)
        ahead.begin(chosen.choice([1, 2, 3]))
        assert behind.waits_for(ahead.present) == (ahead.present[0] != 1)


def test_a_copy_is_of_another_process() -> None:
    calls = calls_of(1)
    calls.begin(1)
    assert copy.deepcopy(calls).present == NO_CALL
