import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipework.schedule import KINDS, Action

numbers = st.integers(0, 10**6)


@given(st.builds(Action, st.sampled_from(KINDS), numbers, numbers))
def test_text_form_round_trip(action):
    assert Action.parse(str(action)) == action


def test_is_a_plain_tuple():
    kind, stage, micro_batch = Action("F", 2, 3)
    assert (kind, stage, micro_batch) == ("F", 2, 3) == Action("F", 2, 3)
    assert str(Action("W", 12, 34)) == "12W34"


def test_white_space_around_is_ignored():
    assert Action.parse(" 1B0\n") == Action("B", 1, 0)


@pytest.mark.parametrize("text", ["", "F", "2F", "F3", "2X3", "2f3", "-1F3", "2 F3", "2F3 1", "2F3.0", "\u0662F3"])
def test_other_text_is_refused(text):
    with pytest.raises(ValueError, match=rf"^{re.escape(repr(text))} is not an action.*write '2F3'"):
        Action.parse(text)
