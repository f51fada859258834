import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipework.schedule import fill_drain, forward_only, from_orders_text, to_orders_text, with_recompute


@given(workers=st.integers(1, 5), micro_batches=st.integers(1, 6), data=st.data())
def test_round_trip(workers, micro_batches, data):
    schedule = with_recompute(fill_drain(workers, micro_batches), data.draw(st.integers(0, micro_batches)))
    assert from_orders_text(to_orders_text(schedule)) == schedule


def test_inference_round_trip():
    schedule = forward_only(2, 3)
    assert "inference" in to_orders_text(schedule).splitlines()
    assert from_orders_text(to_orders_text(schedule)) == schedule


def test_comments_and_empty_lines():
    text = "# from a bug report\n\nschedule my own\n  placement 0 0\nworker 0 0F0 1F0 1B0 0B0\n"
    schedule = from_orders_text(text)
    assert (schedule.name, schedule.placement, schedule.micro_batches) == ("my own", (0, 0), 1)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no line that begins with 'schedule'"),
        ("schedule s", "no line that begins with 'placement'"),
        ("schedule s\nplacement 0\nworker 1 0F0", "line 3, 'worker 1 0F0'.*worker 0 ACTION"),
        ("schedule s\nplacement 0\nworker 0 0F", "line 3.*'0F' is not an action"),
        ("schedule s\nplacement x\nworker 0 0F0", "line 2, 'placement x': 'x' is no worker: wanted a number from 0 on"),
        ("schedule s\nplacement 1\nworker 0 0F0", "the text makes no schedule: stage 0 is placed on worker 1"),
        ("skips 0-2-3", "line 1, 'skips 0-2-3': '0-2-3' is no skip: wanted two stages, from and to"),
        ("skips 0-a", "line 1, 'skips 0-a': 'a' is no stage: wanted a number"),
        ("skip 0-2", r"wanted 'schedule NAME', 'placement W W ..', 'skips S-S ..' .*, 'inference' or 'worker 0 ACTION"),
        ("a.txt", r"the text is 'a.txt', which looks like the name of a file: pass its content, Path\('a.txt'\)"),
        ("schedule s\nschedule t", "line 2, 'schedule t'"),
        ("schedule s\nplacement 0\nwork 0 0F0", "line 3"),
    ],
)
def test_other_text_is_refused(text, message):
    with pytest.raises(ValueError, match=message):
        from_orders_text(text)
