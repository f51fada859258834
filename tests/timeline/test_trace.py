import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipework.schedule import Action, Costs, Interval, Schedule, Timeline, fill_drain, simulate
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


def test_gradients_flow_from_the_input_gradient_half():
    orders = (("0F0", "0B0"), ("1F0", "1I0", "1W0"))
    schedule = Schedule("split", (0, 1), tuple(tuple(map(Action.parse, order)) for order in orders))
    starts = events(simulate(schedule).timeline, "s")
    assert [start["name"] for start in starts] == ["value", "gradient"]


def test_flows_stay_within_their_step():
    rows = [Interval(s, Action("F", s, 0), t, t + 1, step=step) for step, t in ((0, 0), (1, 10)) for s in (0, 1)]
    line = Timeline(tuple(rows), workers=2)
    spans = [(start["ts"], end["ts"]) for start, end in zip(events(line, "s"), events(line, "f"), strict=True)]
    assert spans == [(500, 500), (10_500, 10_500)]


def test_memory_grows_when_an_action_starts_and_shrinks_when_one_ends():
    line = simulate(fill_drain(1, 2)).timeline
    counters = [(event["ts"], event["args"]["held"]) for event in events(line, "C")]
    assert counters == [(0, 1), (1000, 2), (2000, 2), (4000, 1), (4000, 1), (6000, 0)]
    assert events(simulate(fill_drain(1, 2), Costs(activation=0)).timeline, "C") == []


def test_json_is_the_trace():
    line = simulate(fill_drain(2, 2)).timeline
    assert json.loads(trace_json(line)) == trace(line)


def test_json_has_no_infinity():
    with pytest.raises(ValueError, match="JSON"):
        trace_json(Timeline((Interval(0, Action("F", 0, 0), 0.0, float("inf")),), workers=1))
