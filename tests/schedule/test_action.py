import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipework.schedule import KINDS, Action

numbers = st.integers(0, 10**6)


@given(
    st.tuples(st.sampled_from(KINDS.letters(scope="micro-batch")), numbers, numbers)
    | st.tuples(st.sampled_from(KINDS.letters(scope="transfer")), numbers, numbers, numbers)
    | st.tuples(st.sampled_from(KINDS.letters(scope="stage")), numbers)
)
def test_text_form_round_trip(fields):
    action = Action(*fields)
    assert Action.parse(str(action)) == action
    assert eval(repr(action)) == action


def test_the_next_stage_needs_no_mention():
    for text, peer in (("1SEND_F0", 2), ("1RECV_F0", 0), ("1SEND_B0", 0), ("1RECV_B0", 2), ("1SEND_F0@5", 5)):
        assert Action.parse(text).peer == peer
        assert str(Action.parse(text)) == text


@pytest.mark.parametrize("text", ["", "F", "2F", "F3", "2X3", "2f3", "-1F3", "2 F3", "2F3 1", "2F3.0", "\u0662F3"])
def test_other_text_is_refused(text):
    for wrong in (text, "2F3@4", "2REDUCE_GRAD3", "2SEND_F", "2SEND_F3@"):
        with pytest.raises(ValueError, match=rf"^{re.escape(repr(wrong))} is not an action.*write '2F3'"):
            Action.parse(wrong)
