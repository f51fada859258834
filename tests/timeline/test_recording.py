import copy
import json
import xml.etree.ElementTree as ElementTree

import pytest
import torch
from torch import nn

from pipework import Pipe
from pipework.schedule import Costs, Interval, fill_drain, simulate, with_recompute
from pipework.timeline import Recording

COSTS = Costs(
    forward=[1, 2], backward=[3, 5], recompute=[0.5, 0.25], activation=[64, 128], checkpoint_activation=[8, 16]
)

TITLES = (("predicted: ", ""), ("measured: ", ", step 1"))


def play(recording, step, schedule, costs=COSTS, *, at=100.0, slower=1.0, loss_outside=True):
    """Record what a runtime with those costs would: phase by phase, worker by worker."""
    recording.begin(step, schedule, loss_outside=loss_outside)
    line = simulate(schedule, costs, loss_outside=loss_outside).timeline
    for phase in ("F", "RBIW"):
        for row in line.by_worker:
            recording.add(
                step,
                [
                    each._replace(start=at + slower * each.start, end=at + slower * each.end)
                    for each in row
                    if each.action.kind in phase
                ],
            )
    return line


def test_what_was_measured_comes_back():
    recording = Recording()
    line = play(recording, 3, fill_drain(2, 4))
    measured = recording.timeline()
    assert set(measured.by_worker[1]) == {each._replace(step=3) for each in line.by_worker[1]}
    assert (measured.unit, measured.memory_unit, measured.start) == ("s", "bytes", 0)
    assert measured.title == "measured: gpipe, 2 workers, 4 micro-batches, step 3"
    assert recording.bubble() == pytest.approx(line.bubble)


def test_prediction_from_measured_costs_equals_what_was_measured():
    for schedule in (fill_drain(2, 4), with_recompute(fill_drain(2, 4), 3)):
        recording = Recording()
        line = play(recording, 0, schedule)
        predicted = recording.predicted()
        assert predicted.makespan == pytest.approx(line.makespan)
        assert predicted.peak_memory == (line.peak_memory(0), line.peak_memory(1))
        assert [each.start for each in predicted.timeline.intervals] == pytest.approx(
            [each.start for each in line.intervals]
        )


def test_costs_are_medians_of_each_stage():
    recording = Recording()
    for step, slower in enumerate([1.0, 1.0, 50.0]):  # the last step was disturbed
        play(recording, step, with_recompute(fill_drain(2, 2), 1), slower=slower)
    costs, names = recording.costs(), ("forward", "backward", "recompute", "activation", "checkpoint_activation")
    assert {name: getattr(costs, name) for name in names} == {name: getattr(COSTS, name) for name in names}
    assert recording.costs(step=2).forward == (50, 100)


def test_several_steps():
    recording = Recording()
    counts = {1: 4, 2: 8, 5: 3}
    bubbles = {step: play(recording, step, fill_drain(2, count)).bubble for step, count in counts.items()}
    assert recording.steps == [1, 2, 5]
    for step, last in ((1, -3), (2, -2), (5, -1)):
        assert len(recording.timeline(step).intervals) == 4 * counts[step]
        assert recording.timeline(last) == recording.timeline(step)
        assert recording.predicted(last).schedule.micro_batches == counts[step]
        assert recording.bubble(step) == pytest.approx(bubbles[step])
    assert recording.bubble() == pytest.approx(sorted(bubbles.values())[1])
    for step in (0, 3, -4):
        with pytest.raises(ValueError, match=f"step {step} was not recorded: choose one of .1, 2, 5."):
            recording.timeline(step)


def test_loss_inside_is_predicted_as_such():
    # With the slower stage first, worker 1 would wait for the last forward if the loss were outside.
    costs, schedule = Costs(forward=[1, 3], backward=[1, 1]), with_recompute(fill_drain(2, 3), 1)
    inside, outside = Recording(), Recording()
    for recording in (inside, outside):
        play(recording, 0, schedule, costs, loss_outside=recording is outside)
    first_recompute = [
        min(each.start for each in recording.predicted().timeline.intervals if each.action.kind == "R")
        for recording in (inside, outside)
    ]
    assert first_recompute == [3, 10]


def test_files(tmp_path):
    recording = Recording()
    play(recording, 0, fill_drain(2, 4), at=10)
    play(recording, 1, fill_drain(2, 4), at=110)
    recording.save(tmp_path / "x.svg")
    picture = (tmp_path / "x.svg").read_text(encoding="utf-8")
    texts = ElementTree.fromstring(picture).iter("{http://www.w3.org/2000/svg}text")
    said = ["".join(text.itertext()) for text in texts]
    titles = [text for text in said if "gpipe, 2 workers, 4 micro-batches" in text]
    assert titles == [f"{what}gpipe, 2 workers, 4 micro-batches{step}" for what, step in TITLES]
    assert picture == recording._repr_svg_()
    recording.save(str(tmp_path / "x.json"))
    slices = [each for each in json.loads((tmp_path / "x.json").read_text())["traceEvents"] if each["ph"] == "X"]
    assert len(slices) == 32
    assert {event["args"]["step"] for event in slices} == {0, 1}
    assert min(event["ts"] for event in slices if event["args"]["step"] == 1) == 100e6
    for name in ("x.gif", "x", "svg"):
        with pytest.raises(ValueError, match=r"must end in \.svg \(picture\) or \.json \(trace\)"):
            recording.save(tmp_path / name)


def test_nothing_recorded(tmp_path):
    recording = Recording()
    assert recording.steps == []
    assert recording._repr_svg_() is None
    for read in (
        recording.timeline,
        recording.bubble,
        recording.costs,
        recording.predicted,
        lambda: recording.save(tmp_path / "x.svg"),
    ):
        with pytest.raises(ValueError, match=r"nothing was recorded: run a training step inside `with pipe.record\(\)"):
            read()
    assert not list(tmp_path.iterdir())


def test_numbers_that_only_count_are_not_called_steps():
    recording = Recording(counts=True)
    play(recording, 0, fill_drain(1, 1), Costs())
    assert recording.timeline().title == "measured: gpipe, 1 worker, 1 micro-batch"
    play(recording, 1, fill_drain(1, 1), Costs())
    assert recording.timeline(0).title == "measured: gpipe, 1 worker, 1 micro-batch, mini-batch 1 of 2"
    assert recording.timeline().title == "measured: gpipe, 1 worker, 1 micro-batch, mini-batch 2 of 2"


def test_forwards_alone_are_measured_and_predict_nothing():
    recording, schedule = Recording(), fill_drain(2, 1)
    forward = schedule.orders[0][0]
    recording.begin(3, schedule, loss_outside=True)
    recording.add(3, [Interval(0, forward, 1.0, 1.5, sent=64)])
    costs = recording.costs()
    assert (costs.forward, costs.backward, costs.recompute, costs.activation) == ((0.5, 0), (0, 0), (0.5, 0), (0, 0))
    assert costs.message == (64,)
    assert "measured: gpipe, 2 workers, 1 micro-batch, step 3" in recording._repr_svg_()
    assert "predicted" not in recording._repr_svg_()
    with pytest.raises(ValueError, match=r"only forwards were recorded in step 3, .*: record a training step"):
        recording.predicted()
    play(recording, 4, fill_drain(1, 1), Costs())
    with pytest.raises(ValueError, match=r"different stages: choose one, such as costs\(step=4\)"):
        recording.costs()
    assert recording.costs(4).forward == (1,)


@pytest.mark.usefixtures("recorded_graphs")
def test_captured_and_replayed_steps_are_recorded_as_all_others(tmp_path):
    layers = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
    options = {"schedule": "zb-h1", "devices": ["cpu"] * 2, "loss_fn": nn.functional.mse_loss, "checkpoint": "never"}
    pipe, plain = (Pipe(copy.deepcopy(layers), 4, **options, graphs=graphs) for graphs in (True, False))
    x = torch.randn(8, 8)
    for _ in range(4):
        pipe(x, target=x)
        plain(x, target=x)
    with pipe.record() as recording:  # the first one is captured
        for _ in range(3):
            pipe(x, target=x)
    with plain.record() as eager:
        plain(x, target=x)
    assert pipe.graphs[:3] == (1, 2, 4)
    expected = eager.timeline()
    for step in recording.steps:
        line = recording.timeline(step)
        assert [[each.action for each in row] for row in line.by_worker] == [
            [each.action for each in row] for row in expected.by_worker
        ]
        assert all(each.end > each.start for each in line.intervals)
        # The weight of a loss is a tensor, which its graph keeps.
        peaks = [expected.peak_memory(worker) for worker in (0, 1)]
        assert [line.peak_memory(worker) for worker in (0, 1)] == pytest.approx(peaks, abs=8)
        assert recording.predicted(step).makespan > 0
    for name in ("steps.svg", "steps.json"):
        recording.save(tmp_path / name)
