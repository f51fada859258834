from typing import Any

import pytest

from pipework.planning.memory_size import memory_bytes, memory_size


@pytest.mark.parametrize(
    ("text", "size"),
    [("24GiB", 24 * 2**30), ("24 gib", 24 * 2**30), ("1.5MB", 1.5e6), ("7", 7), (" 2B ", 2), (3, 3), (2.5, 2.5)],
)
def test_is_understood(text: Any, size: float) -> None:
    assert memory_bytes(text) == size


@pytest.mark.parametrize("text", ["", "GiB", "24 giraffes", "-1GiB", "1e3", "0GiB", 0, -5, float("inf"), float("nan")])
def test_is_refused(text: Any) -> None:
    with pytest.raises(ValueError, match=r"memory of cuda:0 is .*wanted"):
        memory_bytes(text, "memory of cuda:0")


@pytest.mark.parametrize("value", [None, True, [1]])
def test_other_types(value: Any) -> None:
    with pytest.raises(TypeError, match="wanted a number of bytes"):
        memory_bytes(value)


@pytest.mark.parametrize("size", [1, 1.5, 999, 1023.5, 1025, 3543.01, 2**20 - 1, 80 * 2**30 + 1, 7 * 2**40, 3 * 2**50])
def test_is_written_as_no_less(size: float) -> None:
    assert size <= memory_bytes(memory_size(size)) <= 1.01 * size + 0.01
