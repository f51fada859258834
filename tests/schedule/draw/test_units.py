import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipework.schedule.draw.units import memory_text, ticks, time_text


@pytest.mark.parametrize(
    ("time", "unit", "longest", "shown"),
    [
        (2.0, "s", None, "2 s"),
        (0.002, "s", None, "2 ms"),
        (2e-6, "s", None, "2 \u00b5s"),
        (2e-9, "s", None, "0.002 \u00b5s"),
        (0.0, "s", 0.5, "0 ms"),
        (0.002, "s", 5.0, "0.002 s"),
        (12.0, "", None, "12"),
    ],
)
def test_times(time, unit, longest, shown):
    assert time_text(time, unit, longest) == shown


@pytest.mark.parametrize(
    ("memory", "shown"), [(0, "0 B"), (1023, "1023 B"), (1024, "1 KiB"), (5.5 * 2**20, "5.5 MiB"), (2**40, "1024 GiB")]
)
def test_bytes(memory, shown):
    assert memory_text(memory, "bytes") == shown


@given(st.floats(1e-9, 1e9), st.integers(2, 20))
def test_ticks_are_few_even_and_within(longest, most):
    values = ticks(longest, most)
    assert 1 <= len(values) <= most
    assert values[0] == 0
    assert values[-1] <= longest * (1 + 1e-6)
    if len(values) > 1:
        assert values[-1] + values[1] > longest * (1 - 1e-6), "the axis is filled"
