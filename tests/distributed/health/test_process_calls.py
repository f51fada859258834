"""Counting the calls of all pipes of a process, and comparing those of two."""

import copy
import itertools
import random
import threading

from pipework.distributed.health.process_calls import MOST, ProcessCalls, ProcessPlace


def calls_of(count: int) -> ProcessCalls:
    calls = ProcessCalls()
    for pipe in range(1, count + 1):
        calls.add(pipe)
    return calls


def test_ranks_that_make_the_same_calls_never_cross() -> None:
    chosen = random.Random(0)
    calls = calls_of(3)
    places = [calls.place]
    for _ in range(40):
        calls.begin(chosen.choice([1, 2, 3]))
        places.append(calls.place)
        calls.end()
        places.append(calls.place)
    assert not any(one.crosses(other) for one, other in itertools.product(places, repeat=2))


def test_ranks_in_another_order_cross() -> None:
    places = []
    for last in (1, 2):
        calls = calls_of(2)
        for pipe in (1, 2):
            calls.begin(pipe)
            calls.end()
        calls.begin(last)
        places.append(calls.place)
    assert places == [ProcessPlace(1, {1: 2, 2: 1}), ProcessPlace(2, {1: 1, 2: 2})]
    assert places[0].crosses(places[1])
    assert places[1].crosses(places[0])


def test_a_pipe_that_another_thread_calls_is_left_out() -> None:
    calls = calls_of(2)
    calls.begin(2)
    for _ in range(2):
        thread = threading.Thread(target=lambda: (calls.begin(1), calls.end()))
        thread.start()
        thread.join()
    assert calls.place == ProcessPlace(2, {2: 1})
    calls.end()
    calls.begin(1)
    assert calls.place == ProcessPlace(0, {2: 1})
    assert not calls.place.crosses(ProcessPlace(2, {1: 5, 2: 1}))


def test_only_the_last_pipes_are_counted() -> None:
    assert list(calls_of(MOST + 2).place.begun) == list(range(3, MOST + 3))


def test_a_copy_is_of_another_process() -> None:
    calls = calls_of(1)
    calls.begin(1)
    assert copy.deepcopy(calls).place == ProcessPlace()
