"""Each rank measures its own device; all get one plan."""

from collections.abc import Mapping

import pytest

from pipework.planning import Profile
from pipework.planning.layer_costs import LinkSpeed
from pipework.planning.measuring.on_ranks import memory_of_ranks, profile_of_ranks
from tests.planning.made_profiles import made

FAST, SLOW = LinkSpeed(1.0, 100.0), LinkSpeed(2.0, 10.0)


def of_speeds(*speeds: float, kinds: Mapping[int, str] | None = None) -> list[Profile]:
    return [made([1.0, 1.0], speeds={(kinds or {}).get(i, "cpu"): speed}) for i, speed in enumerate(speeds)]


def test_ranks_that_are_about_as_fast_are_one_kind() -> None:
    found = profile_of_ranks(of_speeds(1.0, 0.9, 0.95), [0, 1, 2], 3, [FAST, SLOW])
    assert found.devices == {"rank 0": "cpu", "rank 1": "cpu", "rank 2": "cpu"}
    assert found.kinds["cpu"].seconds[0][0].forward == pytest.approx(1 / 0.95)
    assert found.links == {("cpu", "cpu"): LinkSpeed(2.0, 10.0)}


def test_a_slow_rank_is_a_kind_of_its_own() -> None:
    found = profile_of_ranks(of_speeds(1.0, 0.5, 1.0), [4, 5, 6], 3, [FAST, SLOW])
    slow, rest = "cpu of rank 5", "cpu"
    assert found.devices == {"rank 4": rest, "rank 5": slow, "rank 6": rest}
    assert found.kinds[slow].seconds[0][0].forward == 2.0
    assert found.transfer(rest, slow, 0) == 2.0


def test_a_worker_is_as_fast_as_its_slowest_replica() -> None:
    found = profile_of_ranks(of_speeds(1.0, 1.0, 0.5, 1.0), [0, 1, 2, 3], 2, [FAST])
    assert found.devices == {"rank 0": "cpu of rank 0", "rank 1": "cpu"}
    assert found.kinds["cpu of rank 0"].seconds[0][0].forward == 2.0


def test_devices_of_two_kinds_that_are_no_neighbours_have_a_link() -> None:
    found = profile_of_ranks(of_speeds(1, 1, 1, kinds={0: "a", 1: "b", 2: "c"}), [0, 1, 2], 3, [FAST, SLOW])
    assert found.transfer("a", "b", 0) == 1.0
    assert found.transfer("b", "c", 0) == found.transfer("c", "a", 0) == 2.0


def test_limits_may_be_given_by_the_device_that_a_rank_has() -> None:
    profiles = of_speeds(1.0, 0.5, 1.0, kinds={0: "cpu", 1: "cpu", 2: "H200"})
    memory = {"cpu": "2GiB", "rank 5": "1GiB", "cpu of rank 4": 7}
    found = memory_of_ranks(memory, profiles, [4, 5, 6])
    assert found == {"rank 4": "2GiB", "rank 5": "1GiB", "cpu of rank 4": 7}
