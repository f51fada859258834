import re
from ast import literal_eval
from dataclasses import replace
from typing import Any

import pytest

from pipework.planning.profiles import Profile
from tests.planning.made_profiles import made
from tests.planning.test_search import UNEVEN, planned

EQUAL = made(UNEVEN, kept=[40] * 8)
HEAVY = made(UNEVEN, kept=[100] * 8, weights=[100, 800, *[100] * 6])
TWO_KINDS = made(UNEVEN, kept=[40] * 8, speeds={"a": 1.0, "b": 0.5})
SHARED = replace(EQUAL, devices={"cpu": "device"})


def named_limits(text: str) -> Any:
    """What a message says would do."""
    found = re.search(r"fits with (?:a limit of ([^;,]*)|the limits (\{[^}]*\}))", text)
    assert found, text
    return found[1] or literal_eval(found[2])


@pytest.mark.parametrize(
    ("profile", "devices", "memory"),
    [
        (EQUAL, ["device"] * 2, 100),  # far too small for any layer
        (EQUAL, ["device"] * 2, 1000),  # too small for all weights
        (EQUAL, ["device"] * 2, 1620),  # nearly enough
        (EQUAL, ["device"] * 4, 820),
        (HEAVY, ["device"] * 2, 1000),  # too small for one layer
        (HEAVY, ["device"] * 2, 3500),  # enough for it alone
        (TWO_KINDS, ["a", "b"], {"a": 500, "b": 100}),
        (TWO_KINDS, ["a", "b"], {"a": 2000, "b": 1300}),
        (TWO_KINDS, ["a", "b", "b"], 600),
        (SHARED, ["cpu", "cpu"], 2000),
        (SHARED, ["cpu", "cpu", "device"], {"cpu": 500, "device": 700}),
    ],
)
def test_a_refused_limit_is_answered_with_one_that_does(profile: Profile, devices: list[str], memory: Any) -> None:
    with pytest.raises(ValueError) as refused:  # noqa: PT011
        planned(profile, devices, memory, iterations=20)
    limits = named_limits(str(refused.value))
    plan = planned(profile, devices, limits, iterations=20)
    assert all(each.fits for each in plan.workers)


def test_only_limits_that_lack_are_raised() -> None:
    with pytest.raises(ValueError, match="no plan fits") as refused:
        planned(TWO_KINDS, ["a", "b"], {"a": 2000, "b": 1300}, schedules=["1f1b"])
    limits = named_limits(str(refused.value))
    assert list(limits) == ["a", "b"]
    with pytest.raises(ValueError, match="fits with a limit of"):  # both devices are alike: a number
        planned(replace(TWO_KINDS, links={}), ["b", "b"], {"b": 100})


def test_the_device_that_lacks_is_named() -> None:
    text = r"worker 1 \(device\) needs 3.6\d KiB and may hold 3.42 KiB \(\d.\d+% too much\)"
    with pytest.raises(ValueError, match=text):
        planned(HEAVY, memory=3500)


def test_workers_of_one_device_share_its_limit() -> None:
    with pytest.raises(ValueError, match=r"a limit of 3.\d+KiB, which workers of one device share evenly"):
        planned(SHARED, ["cpu", "cpu"], 2000)
