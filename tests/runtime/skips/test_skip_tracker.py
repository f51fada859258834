import contextlib
import threading

import pytest
import torch

from pipework.runtime.skips import skip_tracker
from pipework.runtime.skips.skip_tracker import LocalTracker


def test_a_tensor_is_kept_until_its_last_popper_has_asked() -> None:
    tracker, tensor = LocalTracker(), torch.ones(1)
    tracker.save("key", tensor, 2)
    assert tracker.load("key") is tensor
    assert tracker.load("key") is tensor
    with pytest.raises(KeyError):
        tracker.load("key")


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
