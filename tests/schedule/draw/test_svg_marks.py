import xml.etree.ElementTree as ElementTree

from hypothesis import given
from hypothesis import strategies as st

from pipework.schedule.draw.svg_marks import group, number, rectangle, text, text_width


@given(st.floats(-1e6, 1e6))
def test_numbers_have_at_most_two_decimals(value):
    shown = number(value)
    assert abs(float(shown) - value) <= 0.005 + 1e-9
    assert "e" not in shown
    assert shown != "-0"
    assert len(shown.partition(".")[2]) <= 2


@given(st.text(), st.text(max_size=5))
def test_any_text_is_valid_xml(content, sub):
    element = ElementTree.fromstring(text(0, 0, content, 10, sub=sub, text_anchor="middle"))
    assert element.get("text-anchor") == "middle"


def test_a_group_holds_its_marks():
    root = ElementTree.fromstring(group([rectangle(0, 1, 2, 3, stroke_width=1)] * 2, fill="red"))
    assert [dict(each.attrib) for each in root] == [
        {"x": "0", "y": "1", "width": "2", "height": "3", "stroke-width": "1"}
    ] * 2


def test_narrow_letters_are_narrow():
    assert text_width("ill") < text_width("abc") < text_width("ABC")
    assert text_width("a", "b") < text_width("ab")
