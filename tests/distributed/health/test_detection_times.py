"""Times that are refused, and a clock that counts no gap in full."""

import pytest

from pipework.distributed.health.detection_times import CappedClock, DetectionTimes

GOOD = {"beat": 0.5, "detect": 10.0, "poll": 0.1, "join": 60.0, "action_timeout": None}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"poll": 0.6}, "poll <= beat"),
        ({"poll": 0.0}, "poll <= beat"),
        ({"detect": 1.9}, r"detect >= 4 x beat.*got poll=0.1, beat=0.5, detect=1.9 \(seconds\)"),
        ({"detect": float("nan")}, "detect >= 4 x beat"),
        ({"join": 0.0}, "join must be a positive number of seconds, got 0.0"),
        ({"action_timeout": -1.0}, "action_timeout must be a positive number of seconds, got -1.0"),
    ],
)
def test_times_that_contradict_each_other(values: dict[str, float], message: str) -> None:
    assert DetectionTimes(**GOOD).longest_gap == 1.0
    with pytest.raises(ValueError, match=message):
        DetectionTimes(**{**GOOD, **values})


def test_a_long_gap_counts_up_to_the_bound() -> None:
    clock = CappedClock(longest=2.0)
    assert [clock.elapsed(now) for now in (5.0, 6.5, 8.5, 100.0, 100.25)] == [0.0, 1.5, 2.0, 2.0, 0.25]
