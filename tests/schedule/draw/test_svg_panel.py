import pytest

from pipework.schedule import fill_drain, simulate
from pipework.schedule.draw.svg_panel import Caption, Frame, Look

LINE = simulate(fill_drain(2, 3)).timeline


def frame(*, colors="action", labels="stage", memory=True, width=900.0):
    look = Look(colors, labels, update=False, memory=memory)
    return Frame(50.0, 20.0, width, LINE.makespan, LINE.workers, look, 0.0)


def test_rows_do_not_overlap_and_worker_0_is_on_top():
    for each in (frame(), frame(memory=False), frame(colors="worker", memory=False)):
        assert each.y(1) >= each.y(0) + each.row + each.strip
        assert each.y(1) + each.row + each.strip <= each.bottom + 1e-9
        assert (each.x(0.0), each.x(LINE.makespan)) == (50.0, 950.0)


@pytest.mark.parametrize(
    ("labels", "width", "form"),
    [
        ("stage", 900.0, "stage"),
        ("stage", 160.0, "kind"),
        ("micro_batch", 900.0, "micro_batch"),
        ("none", 900.0, "none"),
    ],
)
def test_the_most_detailed_caption_that_fits(labels, width, form):
    assert Caption.fitting(LINE, frame(labels=labels, width=width)).form == form


def test_a_cell_that_is_too_narrow_has_the_kind_or_nothing():
    caption = Caption.fitting(LINE, frame())
    first = LINE.intervals[0]
    assert caption.fitted(first, 100.0) == ("F", "0,0")
    assert caption.fitted(first, caption.size + 2) == ("F", "")
    assert caption.fitted(first, 1.0) == ("", "")
