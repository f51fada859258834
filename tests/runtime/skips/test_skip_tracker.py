import contextlib
import threading

from pipework.runtime.skips import skip_tracker
from pipework.runtime.skips.skip_tracker import LocalTracker


def test_each_thread_has_a_tracker_of_its_own() -> None:
    others: list[object] = []
    thread = threading.Thread(target=lambda: others.append(skip_tracker.current()))
    thread.start()
    thread.join()
    assert skip_tracker.current() is skip_tracker.current()
    assert others[0] is not skip_tracker.current()


def test_another_tracker_is_in_place_only_inside() -> None:
    before, own = skip_tracker.current(), LocalTracker()
    with contextlib.suppress(ZeroDivisionError), skip_tracker.using(own):
        assert skip_tracker.current() is own
        raise ZeroDivisionError
    assert skip_tracker.current() is before
