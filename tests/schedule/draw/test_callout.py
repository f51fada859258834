import re

from pipework.schedule.draw.callout import Area, bubble, largest_idle, time_arrow


def test_the_largest_area_may_span_rows():
    narrow, wide = [(0.0, 100.0)], [(20.0, 300.0)]
    assert largest_idle([wide, narrow], pitch=40.0) == Area(20.0, 300.0, 0, 0)
    assert largest_idle([wide, wide, narrow], pitch=40.0) == Area(20.0, 300.0, 0, 1)


def test_areas_without_room_for_a_word_are_left_out():
    assert largest_idle([[(0.0, 80.0)]], pitch=40.0) is None
    assert largest_idle([[(0.0, 300.0)]], pitch=10.0) is None
    assert largest_idle([], pitch=40.0) is None


def test_both_marks_stay_inside_their_area():
    box = bubble(200, 100, 160, 50)[0]
    x, y, width, height = (float(re.search(rf' {name}="([^"]+)"', box)[1]) for name in ("x", "y", "width", "height"))
    assert 120 <= x <= x + width <= 280
    assert 75 <= y <= y + height <= 125
    points = re.search('points="([^"]+)"', time_arrow(200, 100, 160, 50)[0])[1].split()
    for point in points:
        across, down = map(float, point.split(","))
        assert 120 <= across <= 280
        assert 75 <= down <= 125
