"""Each rank measures its own device; all get one plan."""

from pipework.planning.layer_costs import LinkSpeed
from pipework.planning.measuring.on_ranks import profile_of_ranks
from tests.planning.made_profiles import made

FAST, SLOW = LinkSpeed(1.0, 100.0), LinkSpeed(2.0, 10.0)


def test_each_worker_is_as_fast_as_its_slowest_replica() -> None:
    profiles = [made([1.0, 1.0], speeds={"cpu": speed}) for speed in (1.0, 0.5, 1.0, 0.25, 1.0, 1.0)]
    found = profile_of_ranks(profiles, [4, 5, 6, 7, 8, 9], [FAST, SLOW])  # two replicas of three workers
    seconds = {name: kind.seconds[0][0].forward for name, kind in found.kinds.items()}
    assert seconds == {"rank 4": 4.0, "rank 5": 2.0, "rank 6": 1.0}


def test_workers_that_are_no_neighbours_have_the_slowest_link() -> None:
    found = profile_of_ranks([made([1.0, 1.0])] * 3, [0, 1, 2], [FAST, SLOW])
    assert found.transfer("rank 0", "rank 1", 0) == 1.0
    assert found.transfer("rank 1", "rank 2", 0) == found.transfer("rank 2", "rank 0", 0) == 2.0
