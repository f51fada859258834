from dataclasses import replace
from itertools import product
from math import inf, nan
from typing import Any

import pytest

from pipework.planning.request import make_request, memory_bytes, memory_size, micro_batch_counts
from tests.planning.made_profiles import made

PROFILE = replace(made([1.0] * 8, batch=64, speeds={"large": 1.0, "small": 0.5}), devices={"one": "small"})


def test_limits_by_device_by_kind_and_for_all() -> None:
    def limits(memory: Any, devices: list[str]) -> tuple[float, ...]:
        return make_request(PROFILE, devices, memory).limits

    assert limits(None, ["large", "small"]) == (inf, inf)
    assert limits("1KiB", ["large", "small"]) == (1024, 1024)
    assert limits({"small": 100}, ["large", "small"]) == (inf, 100)
    assert limits({"small": 100}, ["small", "large", "small"]) == (100, inf, 100)  # two devices of a kind
    assert limits({"one": 100}, ["one", "large", "one"]) == (50, inf, 50)  # two workers of one device
    own = made([1.0] * 4, memory=1000)
    assert make_request(own, ["device"]).limits == (1000,)


def test_counts_are_few_and_possible() -> None:
    for rows, workers in product([1, 2, 7, 8, 12, 64, 97, 1000, 4096], [1, 2, 4, 8]):
        counts = micro_batch_counts(rows, workers)
        assert 1 <= len(counts) <= 10
        assert list(counts) == sorted(set(counts))
        assert all(min(workers, rows) <= count <= min(rows, 32 * workers) for count in counts)


@pytest.mark.parametrize("size", [1, 1.5, 999, 1023.5, 1025, 3543.01, 2**20 - 1, 80 * 2**30 + 1, 7 * 2**40, 3 * 2**50])
def test_an_amount_is_written_as_no_less(size: float) -> None:
    assert size <= memory_bytes(memory_size(size)) <= 1.01 * size + 0.01


def test_amounts_of_memory() -> None:
    sizes = {"24GiB": 24 * 2**30, "1.5MB": 1.5e6, "2kb": 2000, "1 tib": 2**40, "7": 7, " 2B ": 2, 3: 3, 2.5: 2.5}
    assert {text: memory_bytes(text) for text in sizes} == sizes
    for text in ("", "GiB", "24 giraffes", "24G", "-1GiB", "1e3", "0GiB", 0, -5, inf, nan):
        with pytest.raises(ValueError, match=r"memory of cuda:0 is .*wanted"):
            memory_bytes(text, "memory of cuda:0")
    for value in (None, True, [1]):
        with pytest.raises(TypeError, match="wanted a number of bytes"):
            memory_bytes(value)  # type: ignore[arg-type]
