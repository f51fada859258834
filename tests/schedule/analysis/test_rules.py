import pytest

from pipework.schedule import validate
from pipework.schedule.analysis.rules import broken
from tests.schedule.orders_text import schedule_of


@pytest.mark.parametrize(
    ("text", "ascending"),
    [
        ("0F0 0F1 0B0 0B1", True),
        ("0F1 0F0 0B0 0B1", True),  # forwards add to no gradient
        ("0F0 0F1 0B1 0B0", False),
        ("0F0 0F1 0I0 0I1 0W0 0W1", True),
        ("0F0 0F1 0I0 0I1 0W1 0W0", False),
        ("0F0 0F1 0I1 0I0 0W0 0W1", False),  # parameters that are not put off get their gradient in I
        ("0F0 0F1 0I0 0B1 0W0", False),
        ("0F0 0F1 0I1 0B0 0W1", False),
        ("0F0 0F1 0I0 0W0 0B1", True),
    ],
)
def test_ascending(text, ascending):
    validation = validate(schedule_of(text))
    assert validation.ok
    assert validation.ascending is ascending


def test_ascending_is_a_matter_of_each_stage():
    assert validate(schedule_of("0F0 0F1 1F0 1F1 1B0 1B1 0B0 0B1", placement=(0, 0))).ascending


SENT = "0F0 0SEND_F0 0RECV_B0 0B0\n1RECV_F0 1F0 1B0 1SEND_B0"


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("0SEND_F0 ", "", "0SEND_F0 is missing in the order of worker 0, which has other transfers"),
        ("1RECV_F0 ", "", "1RECV_F0 is missing in the order of worker 1, which has other transfers"),
        ("0F0 0SEND_F0", "0SEND_F0 0F0", "0SEND_F0 is before 0F0, which makes the value that it sends"),
        ("0RECV_B0 0B0", "0B0 0RECV_B0", "0RECV_B0 is after 0B0, which needs the value that it receives"),
        ("0SEND_F0", "0SEND_F0 0SEND_F0", "0SEND_F0 occurs 2 times, wanted once"),
        (
            "1F0",
            "1F0 1SEND_F0@0",
            "1SEND_F0@0 is a transfer, but no value goes from one worker to another on that route",
        ),
        ("1F0", "1F0 0RECV_B0", "0RECV_B0 is in the order of worker 1, but stage 0 is on worker 0"),
        ("1B0", "1REDUCE_GRAD 1B0", "0REDUCE_GRAD is missing in the order of worker 0, but other stages have one"),
        ("1B0", "1REDUCE_GRAD 1B0", "1REDUCE_GRAD is before 1B0, which adds to the gradient"),
        ("1F0", "1F0 1UNSHARD", "1F0 needs the weights, but there is no 1UNSHARD before it"),
        ("1F0", "1UNSHARD 1F0 1UNSHARD", "1UNSHARD comes when the weights have been gathered already"),
        ("1F0", "1F0 1RESHARD", "1RESHARD comes when the weights have not been gathered"),
    ],
)
def test_what_passes_add_is_checked(old, new, expected):
    assert not broken(schedule_of(SENT))
    assert expected in [each.message for each in broken(schedule_of(SENT.replace(old, new, 1)))]
