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
    ("profile", "devices", "memory", "text"),
    [
        (EQUAL, ["device"] * 2, 100, ""),  # far too small for any layer
        (EQUAL, ["device"] * 2, 1000, ""),  # too small for all weights
        (EQUAL, ["device"] * 2, 1620, ""),  # nearly enough
        (HEAVY, ["device"] * 2, 1000, ""),  # too small for one layer
        (
            *(HEAVY, ["device"] * 2, 3500),  # enough for it alone
            r"worker 1 \(device\) needs 3.6\d KiB and may hold 3.42 KiB \(\d.\d+% too much\)",
        ),
        (TWO_KINDS, ["a", "b"], {"a": 2000, "b": 1300}, "the limits {'a': .*, 'b': "),
        (TWO_KINDS, ["a", "b", "b"], 600, ""),
        (TWO_KINDS, ["b", "b"], {"b": 100}, "a limit of"),  # both devices are alike: a number
        (SHARED, ["cpu", "cpu"], 2000, r"a limit of 3.\d+KiB, which workers of one device share evenly"),
        (SHARED, ["cpu", "cpu", "device"], {"cpu": 500, "device": 700}, ""),
    ],
)
def test_a_refused_limit_is_answered_with_one_that_does(
    profile: Profile, devices: list[str], memory: Any, text: str
) -> None:
    with pytest.raises(ValueError, match=f"no plan fits: .*{text}") as refused:
        planned(profile, devices, memory, iterations=20)
    limits = named_limits(str(refused.value))
    plan = planned(profile, devices, limits, iterations=20)
    assert all(each.fits for each in plan.workers)
