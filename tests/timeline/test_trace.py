import json
from dataclasses import replace

import pytest

from pipework.schedule import (
    Action,
    Costs,
    Interval,
    Timeline,
    fill_drain,
    looped_bfs,
    simulate,
    with_gradient_reduction,
    with_skips,
)
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


@pytest.mark.parametrize("channel", ["unbounded", "pair"])
def test_arrows_go_from_the_action_that_makes_to_the_one_that_needs(channel):
    schedule = with_skips(looped_bfs(2, 3, 2), [(0, 3)])
    line = simulate(schedule, Costs(transfer=0.5, skip_transfer=2), channel=channel).timeline
    second = tuple(each._replace(step=1, start=each.start + 99, end=each.end + 99) for each in line.intervals)
    line = replace(line, intervals=line.intervals + second)

    def slice_at(event):
        (found,) = [
            (each["name"], each["args"]["step"])
            for each in events(line, "X")
            if (each["pid"], each["tid"]) == (event["pid"], event["tid"])
            and each["ts"] <= event["ts"] < each["ts"] + each["dur"]
        ]
        return found

    ends = {event["id"]: event for event in events(line, "f")}
    found = {(event["name"], *slice_at(event), *slice_at(ends.pop(event["id"]))) for event in events(line, "s")}
    assert not ends
    pairs = [(0, 1), (1, 2), (2, 3), *([(0, 3)] if channel == "pair" else [])]  # a skip is known by its transfers
    wanted = {("value", f"{s}F{m}", step, f"{t}F{m}", step) for s, t in pairs for m in range(3) for step in (0, 1)}
    wanted |= {("gradient", f"{t}B{m}", step, f"{s}B{m}", step) for s, t in pairs for m in range(3) for step in (0, 1)}
    assert found == wanted
    assert json.loads(trace_json(line)) == trace(line)


def test_channels_have_tracks_of_their_own():
    line = simulate(with_gradient_reduction(fill_drain(2, 2)), Costs(reduce_gradient=2), channel="pair").timeline
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in events(line, "M") if e["name"] == "thread_name"}
    assert set(names.values()) >= {"compute", "send", "receive", "reduce"}
    by_name = {each["name"]: each for each in events(line, "X")}
    send = by_name["0SEND_F1"]
    assert (names[send["pid"], send["tid"]].split()[0], send["cat"]) == ("send", "send")
    assert send["args"] == {"stage": 0, "micro-batch": 1, "peer": 1, "step": 0}
    assert by_name["1REDUCE_GRAD"]["args"] == {"stage": 1, "step": 0}
    assert len(by_name) == len(line.intervals) + len(line.communication)


def test_memory_grows_when_an_action_starts_and_shrinks_when_one_ends():
    line = simulate(fill_drain(1, 2)).timeline
    counters = [(event["ts"], event["args"]["held"]) for event in events(line, "C")]
    assert counters == [(0, 1), (1000, 2), (4000, 1), (6000, 0)]
    assert events(simulate(fill_drain(1, 2), Costs(activation=0)).timeline, "C") == []


def test_json_has_no_infinity():
    with pytest.raises(ValueError, match="JSON"):
        trace_json(Timeline((Interval(0, Action("F", 0, 0), 0.0, float("inf")),), workers=1))
