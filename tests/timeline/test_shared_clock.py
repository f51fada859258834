import json
import time

import pytest

from pipework.schedule import Action, Interval
from pipework.timeline.shared_clock import intervals_as_text, intervals_from_text

INTERVALS = [Interval(1, Action("F", 1, 3), 5.0, 6.5, 64, held=8, sent=4)]


def test_one_host_has_one_clock():
    assert intervals_from_text(intervals_as_text(INTERVALS)) == INTERVALS


def test_times_of_another_host_are_converted():
    record = json.loads(intervals_as_text(INTERVALS))
    record |= {"host": "another", "origin": time.time() - time.perf_counter() + 100.0}
    (found,) = intervals_from_text(json.dumps(record))
    assert found.start == pytest.approx(105.0, abs=0.5)
    assert found.end - found.start == pytest.approx(1.5)
    assert found._replace(start=5.0, end=6.5) == INTERVALS[0]
