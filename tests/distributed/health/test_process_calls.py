"""Counting the calls of all pipes of a process, and comparing those of two."""

import copy
import itertools
import random
import threading
from typing import Any

import pytest

from pipework.distributed.health.process_calls import MOST, ProcessCalls, ProcessPlace


def in_thread(function: object) -> None:
    thread = threading.Thread(target=function)
    thread.start()
    thread.join()


def test_ranks_that_make_the_same_calls_never_cross() -> None:
    chosen = random.Random(0)
    calls = ProcessCalls()
    pipes = [calls.of_pipe(number) for number in range(1, 4)]
    places = [calls.place]
    for _ in range(40):
        pipe = chosen.choice(pipes)
        pipe.begin()
        places.append(calls.place)
        pipe.end()
        places.append(calls.place)
    assert not any(one.crosses(other) for one, other in itertools.product(places, repeat=2))


def test_ranks_in_another_order_cross() -> None:
    places = []
    for order in (1, 2), (2, 1):
        calls = ProcessCalls()
        pipes = {number: calls.of_pipe(number) for number in (1, 2)}
        for number in (1, 2):
            pipes[number].begin()
            pipes[number].end()
        pipes[order[0]].begin()
        places.append(calls.place)
    assert places == [ProcessPlace(1, {1: 2, 2: 1}), ProcessPlace(2, {1: 1, 2: 2})]
    assert places[0].crosses(places[1])
    assert places[1].crosses(places[0])


@pytest.mark.parametrize("begins", [1, 2])
def test_a_pipe_that_another_thread_calls_is_left_out(begins: int) -> None:
    calls = ProcessCalls()
    first, second = calls.of_pipe(1), calls.of_pipe(2)
    second.begin()
    for _ in range(begins):
        in_thread(lambda: (first.begin(), first.end()))
    assert calls.place == ProcessPlace(2, {2: 1})
    second.end()
    first.begin()
    assert calls.place == ProcessPlace(0, {2: 1})
    assert not calls.place.crosses(ProcessPlace(2, {1: 5, 2: 1}))


def test_a_pipe_that_is_left_out_while_a_call_ends_stays_out() -> None:
    calls = ProcessCalls()
    first, second = calls.of_pipe(1), calls.of_pipe(2)
    second.begin()
    other = threading.Thread(target=first.begin)

    class Slow(ProcessPlace):
        def _replace(self, **changes: Any) -> ProcessPlace:
            if threading.current_thread() is not other:
                other.start()
                other.join(0.1)
            return super()._replace(**changes)

    calls.place = Slow(*calls.place)
    second.end()
    other.join()
    assert calls.place == ProcessPlace(0, {2: 1})


def test_only_the_pipes_used_last_are_counted() -> None:
    calls = ProcessCalls()
    first = calls.of_pipe(1)
    others = [calls.of_pipe(number) for number in range(2, MOST + 1)]
    assert len(calls.place.begun) == MOST
    first.begin()
    calls.of_pipe(MOST + 1)
    assert len(calls.place.begun) == MOST
    assert others[0].number not in calls.place.begun
    assert calls.place.begun[1] == 1


def test_a_copy_is_of_another_process() -> None:
    calls = ProcessCalls()
    calls.of_pipe(1).begin()
    assert copy.deepcopy(calls).place == ProcessPlace()
