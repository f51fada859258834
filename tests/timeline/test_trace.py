import json
from collections import Counter, defaultdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipework.schedule import Action, Costs, Interval, Timeline, fill_drain, simulate
from pipework.timeline import trace, trace_json


def events(timeline, phase):
    return [event for event in trace(timeline)["traceEvents"] if event["ph"] == phase]


def test_slices_tell_worker_time_and_micro_batch():
    interval = Interval(1, Action("B", 2, 3), 0.25, 1.0, step=7)
    (slice_,) = events(Timeline((interval,), workers=2, unit="s"), "X")
    assert slice_ == {
        "ph": "X",
        "name": "2B3",
        "cat": "backward",
        "pid": 1,
        "tid": 0,
        "ts": 250_000,
        "dur": 750_000,
        "args": {"stage": 2, "micro-batch": 3, "step": 7},
    }


def test_a_unit_of_cost_is_a_millisecond():
    assert events(simulate(fill_drain(1, 1)).timeline, "X")[1]["dur"] == 2000


def test_workers_are_named_processes():
    names = events(simulate(fill_drain(2, 1)).timeline, "M")
    assert [each["args"]["name"] for each in names if each["name"] == "process_name"] == ["worker 0", "worker 1"]
    assert {each["args"]["name"] for each in names if each["name"] == "thread_name"} == {"compute"}


@given(st.integers(1, 5), st.integers(1, 5))
def test_flows_go_from_slice_to_slice(workers, micro_batches):
    line = simulate(fill_drain(workers, micro_batches), Costs(transfer=0.5)).timeline

    def slice_at(event):
        (name,) = [
            each["name"]
            for each in events(line, "X")
            if each["pid"] == event["pid"] and each["ts"] <= event["ts"] < each["ts"] + each["dur"]
        ]
        return name

    ends = {event["id"]: event for event in events(line, "f")}
    found = {(slice_at(start), slice_at(ends.pop(start["id"]))) for start in events(line, "s")}
    assert not ends
    wanted = {(f"{s}F{m}", f"{s + 1}F{m}") for s in range(workers - 1) for m in range(micro_batches)}
    wanted |= {(f"{s + 1}B{m}", f"{s}B{m}") for s in range(workers - 1) for m in range(micro_batches)}
    assert found == wanted


def with_channels(schedule, skip=None):
    """A prediction with a send and a receive between each forward or backward and the next stage's.

    `skip` is a pair of stages with transfers of their own, which take longer and overlap with the others.
    """
    line = simulate(schedule, Costs(transfer=0.5)).timeline
    done = {each.action: each for each in line.intervals}
    stages = range(schedule.stages)
    pairs = [(stage, stage + 1) for stage in stages[:-1]] + ([skip] if skip else [])
    communication = []
    for micro_batch in range(schedule.micro_batches):
        for direction, source, target in [("F", *pair) for pair in pairs] + [("B", *pair[::-1]) for pair in pairs]:
            end = done[Action(direction, source, micro_batch)].end
            for kind, stage, peer in (("SEND", source, target), ("RECV", target, source)):
                action = Action(f"{kind}_{direction}", stage, micro_batch, peer)
                length = 0.5 if abs(source - target) == 1 else 2.0
                communication.append(Interval(schedule.placement[stage], action, end, end + length))
    reductions = [Interval(worker, Action("REDUCE_GRAD", worker), line.end, line.end + 2) for worker in range(2)]
    return Timeline(line.intervals, line.workers, communication=(*communication, *reductions))


def test_channels_have_tracks_of_their_own():
    line = with_channels(fill_drain(2, 2))
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in events(line, "M") if e["name"] == "thread_name"}
    assert set(names.values()) >= {"compute", "send", "receive", "reduce"}
    by_name = {each["name"]: each for each in events(line, "X")}
    send = by_name["0SEND_F1"]
    assert (names[send["pid"], send["tid"]].split()[0], send["cat"]) == ("send", "send")
    assert send["args"] == {"stage": 0, "micro-batch": 1, "peer": 1, "step": 0}
    assert by_name["1REDUCE_GRAD"]["args"] == {"stage": 1, "step": 0}
    assert len(by_name) == len(line.intervals) + len(line.communication)


def test_arrows_go_through_the_channels():
    line = with_channels(fill_drain(4, 3), skip=(0, 3))
    starts, steps, ends = (events(line, phase) for phase in "stf")
    assert set(Counter(each["id"] for each in starts).values()) == {1}
    assert {each["id"] for each in starts} == {each["id"] for each in ends}
    assert len(starts) == len(ends) == 2 * 4 * 3
    slices = events(line, "X")
    ways = defaultdict(list)
    for event in sorted((*starts, *steps, *ends), key=lambda event: event["ts"]):
        (name,) = (
            each["name"]
            for each in slices
            if (each["pid"], each["tid"]) == (event["pid"], event["tid"])
            and each["ts"] <= event["ts"] < each["ts"] + each["dur"]
        )
        ways[event["id"]].append(name)
    assert ["0F1", "0SEND_F1", "1RECV_F1", "1F1"] in ways.values()
    assert ["2B1", "2SEND_B1", "1RECV_B1", "1B1"] in ways.values()
    assert ["0F2", "0SEND_F2@3", "3RECV_F2@0", "3F2"] in ways.values(), "a skip connection's value"
    assert ["3B2", "3SEND_B2@0", "0RECV_B2@3", "0B2"] in ways.values(), "and its gradient"
    assert all(len(way) == 4 for way in ways.values())
    assert json.loads(trace_json(line)) == trace(line)


def test_memory_grows_when_an_action_starts_and_shrinks_when_one_ends():
    line = simulate(fill_drain(1, 2)).timeline
    counters = [(event["ts"], event["args"]["held"]) for event in events(line, "C")]
    assert counters == [(0, 1), (1000, 2), (4000, 1), (6000, 0)]
    assert events(simulate(fill_drain(1, 2), Costs(activation=0)).timeline, "C") == []


def test_json_has_no_infinity():
    with pytest.raises(ValueError, match="JSON"):
        trace_json(Timeline((Interval(0, Action("F", 0, 0), 0.0, float("inf")),), workers=1))
