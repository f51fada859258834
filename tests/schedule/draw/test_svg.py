import re
import xml.etree.ElementTree as ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipework.schedule import Action, Costs, Interval, Schedule, Timeline, fill_drain, simulate, svg, with_recompute

SVG = "{http://www.w3.org/2000/svg}"


def predicted(workers, micro_batches, **costs):
    return simulate(fill_drain(workers, micro_batches), Costs(**costs)).timeline


def parse(picture):
    return ElementTree.fromstring(picture)


def words(picture):
    return ["".join(text.itertext()) for text in parse(picture).iter(f"{SVG}text")]


def cells(picture):
    """(tooltip, rectangle's attributes, label) of each cell."""
    for group in parse(picture).iter(f"{SVG}g"):
        title = group.find(f"{SVG}title")
        if title is not None:
            text = group.find(f"{SVG}text")
            yield title.text, group.find(f"{SVG}rect").attrib, "" if text is None else "".join(text.itertext())


def test_cells_lie_where_their_times_say():
    found = list(cells(svg(predicted(2, 2))))
    assert len(found) == 8
    at = {title.split(":")[0]: (float(box["x"]), float(box["width"]), float(box["y"])) for title, box, _ in found}
    first = at["forward of stage 0, micro-batch 0"]
    assert at["forward of stage 0, micro-batch 1"][0] == pytest.approx(first[0] + first[1], abs=0.02)
    assert at["forward of stage 1, micro-batch 0"][0] == pytest.approx(first[0] + first[1], abs=0.02)
    assert at["backward of stage 0, micro-batch 0"][1] == pytest.approx(2 * first[1], abs=0.02)
    assert at["forward of stage 1, micro-batch 0"][2] > first[2], "worker 0 is on top"
    assert "backward of stage 1, micro-batch 0: 2 to 4 (2), memory 1" in [
        title for title, *_ in cells(svg(predicted(2, 1)))
    ]


def test_head_tells_bubble_makespan_and_memory():
    said = words(svg(predicted(4, 4)))
    assert said[0] == "gpipe, 4 workers, 4 micro-batches"
    assert said[1] == "bubble 42.9% \u00b7 makespan 21 \u00b7 peak memory 4"
    assert said.count("peak 4") == 4
    line = Timeline((Interval(0, Action("F", 0, 0), 0, 2), Interval(1, Action("F", 1, 0), 1, 4)), workers=2)
    assert words(svg(line))[0] == "bubble 37.5% \u00b7 of the span 3: 16.7% \u00b7 makespan 4"
    for line in (Timeline((), workers=2), Timeline((Interval(0, Action("F", 0, 0), 1, 1),), workers=1)):
        assert parse(svg(line, colors="worker", update=True)) is not None


def test_the_look_of_one_colour_a_worker():
    picture = svg(predicted(4, 4), colors="worker", update=True)
    found = list(cells(picture))
    assert {box["fill"] for title, box, _ in found if "stage 2" in title} == {"#c4d5f4"}
    assert len({box["fill"] for _, box, _ in found}) == 4
    assert {label for *_, label in found} == {f"{kind}{s},{m}" for kind in "FB" for s in range(4) for m in range(4)}
    said = words(picture)
    assert said.count("Update") == 4
    assert "peak 4" not in said


def test_the_look_of_one_colour_a_kind():
    halves = tuple(Action(kind, 0, 0) for kind in "FRIW") + tuple(Action(kind, 0, 1) for kind in "FB")
    picture = svg(simulate(Schedule("kinds", (0,), (halves,))).timeline, update=True)
    fills = {title.split(" of ")[0]: box["fill"] for title, box, _ in cells(picture)}
    assert len(set(fills.values())) == 5
    legend = {"forward", "backward", "input gradient", "weight gradient", "recompute", "optimizer", "memory"}
    assert legend <= set(words(picture))
    assert "recompute" not in words(svg(predicted(2, 2)))


def test_the_second_stage_of_a_worker_is_darker():
    order = tuple(Action.parse(text) for text in ("0F0", "1F0", "1B0", "0B0"))
    picture = svg(simulate(Schedule("two", (0, 0), (order,))).timeline)
    fills = {title.split(",")[0]: box["fill"] for title, box, _ in cells(picture)}
    assert int(fills["forward of stage 1"][1:3], 16) < int(fills["forward of stage 0"][1:3], 16)
    assert "darker: further stage of a worker" in words(picture)


def test_labels():
    assert {label for *_, label in cells(svg(predicted(2, 2)))} == {"0", "1"}
    assert {label for *_, label in cells(svg(predicted(2, 300)))} == {""}, "too narrow"


def test_timelines_share_their_axis():
    slow = predicted(2, 2, forward=2, backward=4)
    both = list(cells(svg([predicted(2, 2), slow])))
    widths = [float(box["width"]) for title, box, _ in both if title.startswith("forward of stage 0, micro-batch 0")]
    lefts = [float(box["x"]) for title, box, _ in both if title.startswith("forward of stage 0, micro-batch 0")]
    assert widths[1] == pytest.approx(2 * widths[0], abs=0.02)
    assert lefts[0] == lefts[1]
    tops = [float(box["y"]) for _, box, _ in both]
    assert max(tops[:8]) + 20 < min(tops[8:]), "the first is above the second"
    assert words(svg([slow, slow])).count("time") == 1


def test_memory_strip_only_where_memory_is_known():
    known = svg(predicted(2, 2))
    unknown = svg(predicted(2, 2, activation=0))
    assert "memory" in words(known)
    assert not any("memory" in word or "peak" in word for word in words(unknown))
    assert "memory" not in words(svg(predicted(2, 2), colors="worker"))


@settings(deadline=None, max_examples=10)
@given(
    st.integers(1, 16), st.integers(1, 12), st.sampled_from(["action", "worker"]), st.booleans(), st.text(max_size=20)
)
@pytest.mark.thorough
def test_any_picture_is_whole_and_inside_its_frame(workers, micro_batches, colors, update, title):
    schedule = Schedule(title, range(workers), fill_drain(workers, micro_batches).orders)
    line = simulate(with_recompute(schedule, micro_batches // 2)).timeline
    picture = svg([line, line], colors=colors, update=update)
    assert picture == svg([line, line], colors=colors, update=update)
    root = parse(picture)
    width, height = float(root.get("width")), float(root.get("height"))
    for box in root.iter(f"{SVG}rect"):
        assert 0 <= float(box.get("x")) <= float(box.get("x")) + float(box.get("width")) <= width
        assert 0 <= float(box.get("y")) <= float(box.get("y")) + float(box.get("height")) <= height
    for text in root.iter(f"{SVG}text"):
        assert 0 <= float(text.get("x")) <= width
        assert 0 <= float(text.get("y")) <= height
    assert len(list(cells(picture))) == 2 * len(line.intervals)


def test_text_is_escaped():
    name = "a<b> & \"c\"\x00\x1b 'd' \ud800"
    picture = simulate(Schedule(name, (0,), fill_drain(1, 1).orders)).timeline
    assert words(svg(picture))[0] == "a<b> & \"c\" 'd' , 1 worker, 1 micro-batch"


def test_refers_to_nothing_outside_and_brings_its_own_paper():
    picture = svg(predicted(3, 3), colors="worker", update=True)
    assert re.findall(r"https?://[^\"]*", picture) == ["http://www.w3.org/2000/svg"]
    assert not re.search(r"href|<style|<script|\bid=", picture)
    root = parse(picture)
    paper = next(root.iter(f"{SVG}rect"))
    assert [paper.get(name) for name in ("fill", "width", "height")] == [
        "#ffffff",
        root.get("width"),
        root.get("height"),
    ]


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ([], {}, "no timeline was given"),
        ([Timeline((), 1), Timeline((), 1, unit="s")], {}, "have no common axis"),
        (Timeline((), 1), {"colors": "stage"}, "colors is 'stage': wanted one of 'action', 'worker'"),
    ],
)
def test_refuses(arguments, options, message):
    with pytest.raises(ValueError, match=message):
        svg(arguments, **options)
