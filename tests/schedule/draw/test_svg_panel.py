from pipework.schedule import fill_drain, simulate
from pipework.schedule.draw.svg_panel import Caption, Frame, Look

LINE = simulate(fill_drain(2, 3)).timeline


def frame(*, of_kinds=False, memory=False, width=900.0):
    look = Look(of_kinds, memory=memory)
    return Frame(50.0, 20.0, width, LINE.makespan, LINE.workers, look, 0.0)


def test_rows_do_not_overlap_and_worker_0_is_on_top():
    for each in (frame(), frame(of_kinds=True), frame(of_kinds=True, memory=True)):
        assert each.y(1) >= each.y(0) + each.row + each.strip
        assert each.y(1) + each.row + each.strip <= each.bottom + 1e-9
        assert (each.x(0.0), each.x(LINE.makespan)) == (50.0, 950.0)


def test_the_most_detailed_caption_that_fits():
    forms = [Caption.fitting(LINE, each).form for each in (frame(), frame(width=160.0), frame(of_kinds=True))]
    assert forms == ["stage", "kind", "micro_batch"]
    caption = Caption.fitting(LINE, frame())
    first = LINE.intervals[0]
    # A cell that is too narrow has the kind, or nothing.
    assert caption.fitted(first, 100.0) == ("F", "0,0")
    assert caption.fitted(first, caption.size + 2) == ("F", "")
    assert caption.fitted(first, 1.0) == ("", "")
