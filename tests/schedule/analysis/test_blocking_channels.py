"""Schedules of any size, lowered to sends and receives: found valid if and only if ranks that meet each other get on.

The ranks are simulated as they are between processes: a channel for each direction of each pair, on which the first
message sent must be the first that is received; a send never waits, and an action waits for what it needs.
"""

import heapq
from collections import defaultdict
from dataclasses import replace
from random import Random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pipework.schedule import SCHEDULES, build, validate, with_communication
from pipework.schedule.placement import wave_placement
from tests.schedule.analysis.brute_force import _makes_sense as makes_sense
from tests.schedule.orders_text import to_orders_text

TRAINING = sorted({*SCHEDULES} - {"forward-only"})


def meets(schedule):
    """Whether all ranks come to the end of their orders, and no message is left over."""
    if not makes_sense(schedule):
        return False
    place, orders = schedule.placement, schedule.orders
    position = [0] * schedule.workers
    done, arrived = set(), set()
    sends, receives = defaultdict(list), defaultdict(list)
    last = schedule.stages - 1

    def is_there(kind, source, target, micro_batch):
        if place[source] != place[target]:
            return (kind, source, target, micro_batch) in arrived
        return (kind, source, micro_batch) in done

    def may(action):
        kind, stage, micro_batch, _ = action
        if kind == "F":
            return stage == 0 or is_there("F", stage - 1, stage, micro_batch)
        if kind in "BI":
            has_gradient = stage == last or is_there("B", stage + 1, stage, micro_batch)
            return ("F", stage, micro_batch) in done and has_gradient
        if kind == "W":
            return ("I", stage, micro_batch) in done
        return kind.startswith("RECV") or (kind[-1], stage, micro_batch) in done

    def execute(action):
        kind, stage, micro_batch, peer = action
        if peer < 0:
            done.add((kind, stage, micro_batch))
            if kind == "I":  # from here on there is a gradient to send
                done.add(("B", stage, micro_batch))
            return
        sender, receiver = (stage, peer) if kind.startswith("SEND") else (peer, stage)
        way = place[sender], place[receiver]
        queue = sends if kind.startswith("SEND") else receives
        queue[way].append((kind[-1], sender, receiver, micro_batch))
        count = min(len(sends[way]), len(receives[way]))
        for sent, wanted in zip(sends[way][:count], receives[way][:count], strict=True):
            if sent != wanted:
                return  # the head of the channel is somebody else's: everything behind it waits for ever
            arrived.add(sent)
        del sends[way][:count], receives[way][:count]

    moved = True
    while moved:
        moved = False
        for worker, order in enumerate(orders):
            while position[worker] < len(order) and may(order[position[worker]]):
                execute(order[position[worker]])
                position[worker] += 1
                moved = True
    return all(position[n] == len(order) for n, order in enumerate(orders)) and not any(
        (*sends.values(), *receives.values())
    )


def in_any_order(schedule, random):
    """The same actions in some other order that can be executed, but is none that anybody would write."""
    last = schedule.stages - 1
    worker_of = {action: worker for worker, order in enumerate(schedule.orders) for action in order}
    whole = {(a.stage, a.micro_batch): a.kind for a in worker_of if a.kind in "BI"}
    needs, behind = {}, defaultdict(list)
    for action in worker_of:
        kind, stage, micro_batch, _ = action
        before = []
        if kind == "F" and stage > 0:
            before = [action._replace(stage=stage - 1)]
        elif kind in "BI":
            before = [action._replace(kind="F")]
            if stage < last:
                before.append(action._replace(kind=whole[stage + 1, micro_batch], stage=stage + 1))
        elif kind == "W":
            before = [action._replace(kind="I")]
        needs[action] = len(before)
        for each in before:
            behind[each].append(action)
    orders = [[] for _ in schedule.orders]
    ready = [(random.random(), action) for action, count in needs.items() if not count]
    heapq.heapify(ready)
    while ready:
        _, action = heapq.heappop(ready)
        orders[worker_of[action]].append(action)
        for each in behind[action]:
            needs[each] -= 1
            if not needs[each]:
                heapq.heappush(ready, (random.random(), each))
    return replace(schedule, name="any order", orders=orders)


def mutated(schedule, what, random):
    """An action dropped, doubled, or in the place of another one."""
    orders = [list(order) for order in schedule.orders]
    order = random.choice([each for each in orders if each])
    here, there = random.randrange(len(order)), random.randrange(len(order))
    if what == "drop":
        del order[here]
    elif what == "double":
        order.insert(there, order[here])
    else:
        if what == "neighbours":
            there = max(0, here - 1)
        order[here], order[there] = order[there], order[here]
    return replace(schedule, name=what, orders=orders)


@st.composite
def schedules(draw):
    name = draw(st.sampled_from(TRAINING))
    spec = SCHEDULES[name]
    workers, chunks = draw(st.integers(1, 8)), draw(st.integers(1, 32))
    each = draw(st.integers(1, 4)) if spec.several else None
    if spec.several and spec.placement is wave_placement and each is not None and each % 2:
        each += 1
    random = Random(draw(st.integers(0, 2**32)))
    schedule = build(name, workers=workers, chunks=chunks, stages_per_worker=each)
    if draw(st.booleans()):
        schedule = in_any_order(schedule, random)
    return with_communication(schedule, channel="pair"), random


def check(drawn):
    schedule, random = drawn
    found = validate(schedule, channel="pair")
    assert found.ok, (schedule.name, found.violations)
    assert meets(schedule)
    for what in ("drop", "double", "swap", "neighbours"):
        other = mutated(schedule, what, random)
        verdict = validate(other, channel="pair").ok if any(other.orders) else False
        assert verdict == meets(other), (what, to_orders_text(other))
        assert not (verdict and what in ("drop", "double")), what


CHECKS = [HealthCheck.too_slow, HealthCheck.data_too_large]


@settings(max_examples=60, deadline=None, suppress_health_check=CHECKS)
@given(schedules())
def test_valid_if_and_only_if_ranks_meet(drawn):
    check(drawn)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@settings(max_examples=2_000, deadline=None, suppress_health_check=CHECKS)
@given(schedules())
def test_valid_if_and_only_if_ranks_meet_ten_thousand_times(drawn):
    """Each example is five cases: a schedule, and four mutations of it."""
    check(drawn)
