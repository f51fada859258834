import xml.etree.ElementTree as ElementTree

from hypothesis import given
from hypothesis import strategies as st

from pipework.schedule.draw.svg_marks import number, text


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
