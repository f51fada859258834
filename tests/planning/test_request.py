from dataclasses import replace
from math import inf
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


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"devices": []}, "devices is empty"),
        ({"devices": ["cuda:7"]}, "no times for device 'cuda:7'"),
        ({"memory": {"cuda:7": 5}}, "memory names 'cuda:7', which is none of the devices"),
        ({"memory": "much"}, "memory is 'much'"),
        ({"batch": 0}, "batch"),
        ({"chunks": 65}, "chunks is 65, and a mini-batch has 64 rows"),
        ({"chunks": []}, "chunks is empty"),
        ({"chunks": [4, 0]}, "chunks"),
        ({"optimizer": -1}, "optimizer is -1"),
    ],
)
def test_is_refused(options: dict[str, Any], message: str) -> None:
    arguments = {"devices": ["large", "small"], **options}
    with pytest.raises(ValueError, match=message):
        make_request(PROFILE, **arguments)


@pytest.mark.parametrize("options", [{"optimizer": "adam"}, {"chunks": 2.5}, {"batch": "64"}])
def test_other_types(options: dict[str, Any]) -> None:
    with pytest.raises(TypeError):
        make_request(PROFILE, ["large", "small"], **options)


@pytest.mark.parametrize("rows", [1, 2, 7, 8, 12, 64, 97, 1000, 4096])
@pytest.mark.parametrize("workers", [1, 2, 4, 8])
def test_counts_are_few_and_possible(rows: int, workers: int) -> None:
    counts = micro_batch_counts(rows, workers)
    assert 1 <= len(counts) <= 10
    assert list(counts) == sorted(set(counts))
    assert all(min(workers, rows) <= count <= min(rows, 32 * workers) for count in counts)


@pytest.mark.parametrize(
    ("text", "size"),
    [("24GiB", 24 * 2**30), ("24 gib", 24 * 2**30), ("1.5MB", 1.5e6), ("7", 7), (" 2B ", 2), (3, 3), (2.5, 2.5)],
)
def test_amounts_of_memory(text: Any, size: float) -> None:
    assert memory_bytes(text) == size


@pytest.mark.parametrize("text", ["", "GiB", "24 giraffes", "-1GiB", "1e3", "0GiB", 0, -5, float("inf"), float("nan")])
def test_no_amount_of_memory(text: Any) -> None:
    with pytest.raises(ValueError, match=r"memory of cuda:0 is .*wanted"):
        memory_bytes(text, "memory of cuda:0")


@pytest.mark.parametrize("value", [None, True, [1]])
def test_memory_of_another_type(value: Any) -> None:
    with pytest.raises(TypeError, match="wanted a number of bytes"):
        memory_bytes(value)


@pytest.mark.parametrize("size", [1, 1.5, 999, 1023.5, 1025, 3543.01, 2**20 - 1, 80 * 2**30 + 1, 7 * 2**40, 3 * 2**50])
def test_an_amount_is_written_as_no_less(size: float) -> None:
    assert size <= memory_bytes(memory_size(size)) <= 1.01 * size + 0.01
