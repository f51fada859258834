import json
import xml.etree.ElementTree as ElementTree

import pytest

from pipework.schedule import Action, Costs, Interval, fill_drain, simulate, with_recompute
from pipework.timeline import Recording

COSTS = Costs(
    forward=[1, 2], backward=[3, 5], recompute=[0.5, 0.25], activation=[64, 128], checkpoint_activation=[8, 16]
)


def play(recording, step, schedule, costs=COSTS, *, at=100.0, slower=1.0, loss_outside=True):
    """Record what a runtime with those costs would: phase by phase, worker by worker."""
    recording.begin(step, schedule)
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
    assert recording.workers == 2


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
    costs = recording.costs()
    assert costs.forward == (1, 2)
    assert costs.backward == (3, 5)
    assert costs.recompute == (0.5, 0.25)
    assert costs.activation == (64, 128)
    assert costs.checkpoint_activation == (8, 16)
    assert recording.costs(step=2).forward == (50, 100)


def test_steps_may_have_fewer_micro_batches():
    recording = Recording()
    play(recording, 0, fill_drain(2, 4))
    play(recording, 1, fill_drain(2, 3))
    assert recording.steps == [0, 1]
    assert len(recording.timeline(0).intervals) == 16
    assert len(recording.timeline(1).intervals) == len(recording.timeline(-1).intervals) == 12
    assert len(recording.timeline(-2).intervals) == 16
    assert recording.predicted(0).schedule.micro_batches == 4
    assert recording.predicted().schedule.micro_batches == 3


def test_bubble_is_the_median_over_steps():
    recording = Recording()
    bubbles = [play(recording, step, fill_drain(2, count)).bubble for step, count in enumerate([1, 8, 2])]
    assert recording.bubble() == pytest.approx(sorted(bubbles)[1])
    assert recording.bubble(1) == pytest.approx(bubbles[1])


def test_loss_inside_is_predicted_as_such():
    # With the slower stage first, worker 1 would wait for the last forward if the loss were outside.
    costs, schedule = Costs(forward=[1, 3], backward=[1, 1]), with_recompute(fill_drain(2, 3), 1)
    inside, outside = Recording(loss_outside=False), Recording()
    for recording in (inside, outside):
        play(recording, 0, schedule, costs, loss_outside=recording is outside)
    first_recompute = [
        min(each.start for each in recording.predicted().timeline.intervals if each.action.kind == "R")
        for recording in (inside, outside)
    ]
    assert first_recompute == [3, 10]


def test_save_svg(tmp_path):
    recording = Recording()
    play(recording, 0, fill_drain(2, 4))
    recording.save(tmp_path / "x.svg")
    picture = (tmp_path / "x.svg").read_text(encoding="utf-8")
    said = [
        "".join(text.itertext()) for text in ElementTree.fromstring(picture).iter("{http://www.w3.org/2000/svg}text")
    ]
    assert said.index("predicted: gpipe, 2 workers, 4 micro-batches") < said.index(
        "measured: gpipe, 2 workers, 4 micro-batches, step 0"
    )
    assert picture == recording._repr_svg_()


def test_save_json_has_all_steps(tmp_path):
    recording = Recording()
    play(recording, 0, fill_drain(2, 4), at=10)
    play(recording, 1, fill_drain(2, 4), at=110)
    recording.save(str(tmp_path / "x.json"))
    events = json.loads((tmp_path / "x.json").read_text())["traceEvents"]
    slices = [event for event in events if event["ph"] == "X"]
    assert len(slices) == 32
    assert {event["args"]["step"] for event in slices} == {0, 1}
    assert min(event["ts"] for event in slices if event["args"]["step"] == 1) == 100e6


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


@pytest.mark.parametrize("name", ["x.gif", "x", "svg", "png"])
def test_unknown_ending(tmp_path, name):
    recording = Recording()
    play(recording, 0, fill_drain(1, 1), Costs())
    with pytest.raises(ValueError, match=r"must end in \.svg \(picture\) or \.json \(trace\)"):
        recording.save(tmp_path / name)


def test_numbers_that_only_count_are_not_called_steps():
    recording = Recording(counts=True)
    play(recording, 0, fill_drain(1, 1), Costs())
    assert recording.timeline().title == "measured: gpipe, 1 worker, 1 micro-batch"
    play(recording, 1, fill_drain(1, 1), Costs())
    assert recording.timeline(0).title == "measured: gpipe, 1 worker, 1 micro-batch, mini-batch 1 of 2"
    assert recording.timeline().title == "measured: gpipe, 1 worker, 1 micro-batch, mini-batch 2 of 2"


def test_unknown_step():
    recording = Recording()
    for step in (1, 2, 5):
        play(recording, step, fill_drain(1, 1), Costs())
    for step in (0, 3, -4):
        with pytest.raises(ValueError, match=f"step {step} was not recorded: choose one of .1, 2, 5."):
            recording.timeline(step)
    assert "step 1" in recording.timeline(-3).title


def test_what_the_runtime_must_not_do():
    recording = Recording()
    with pytest.raises(ValueError, match="no schedule is known for step 0"):
        recording.add(0, [])
    recording.begin(0, fill_drain(2, 1))
    with pytest.raises(ValueError, match="step 0 has been recorded already"):
        recording.begin(0, fill_drain(2, 1))
    with pytest.raises(ValueError, match="step is -1"):
        recording.begin(-1)
    recording.begin(1, loss_outside=False)
    assert recording.loss_outside is False
    with pytest.raises(ValueError, match="worker is 2, but the schedule of step 0 has the workers 0 to 1"):
        recording.add(0, [Interval(2, Action("F", 0, 0), 0.0, 1.0)])


def test_forwards_alone_are_measured_and_predict_nothing():
    recording, schedule = Recording(), fill_drain(2, 1)
    forward = schedule.orders[0][0]
    recording.begin(3, schedule)
    recording.add(3, [Interval(0, forward, 1.0, 1.5, sent=64)])
    costs = recording.costs()
    assert (costs.forward, costs.backward, costs.recompute, costs.activation) == ((0.5, 0), (0, 0), None, (0, 0))
    assert costs.message == (64,)
    assert "measured: gpipe, 2 workers, 1 micro-batch, step 3" in recording._repr_svg_()
    assert "predicted" not in recording._repr_svg_()
    with pytest.raises(ValueError, match=r"only forwards were recorded in step 3, .*: record a training step"):
        recording.predicted()
    play(recording, 4, fill_drain(1, 1), Costs())
    with pytest.raises(ValueError, match=r"different stages: choose one, such as costs\(step=4\)"):
        recording.costs()
    assert recording.costs(4).forward == (1,)
