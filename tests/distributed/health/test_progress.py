"""What the hot loop writes."""

import pytest

from pipework.distributed.health.progress import Progress


def test_a_wait_ends_with_its_context_also_after_an_error() -> None:
    progress = Progress()
    seen = []

    def fail() -> None:
        with progress.waits():
            seen.append(progress.waiting)
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert seen == [True]
    assert not progress.waiting


def test_it_has_no_other_attributes() -> None:
    with pytest.raises(AttributeError):
        Progress().acton = "F"  # type: ignore[attr-defined]
