import pytest

from pipework.runtime.failure import Failure, add_note
from pipework.schedule import Action


def test_only_the_first_error_is_kept_and_it_wakes_the_others_once() -> None:
    woken: list[bool] = []
    failure = Failure(lambda: woken.append(failure.happened))
    first = ValueError("first")
    add_note(first, "stage 1, micro-batch 2, action F")  # a note stands on an error once
    failure.report(first, Action("F", 1, 2))
    failure.report(ValueError("second"), Action("B", 0, 0))
    assert woken == [True]
    assert failure.error is first
    assert first.__notes__ == ["pipework: stage 1, micro-batch 2, action F"]


def test_the_error_that_explains_the_first_one_is_raised() -> None:
    failure = Failure(lambda: None, lambda error: RuntimeError(f"rank 2 is gone: {error!r}"))
    failure.report(ValueError())
    with pytest.raises(RuntimeError, match=r"rank 2 is gone: ValueError\(\)"):
        failure.raise_first()


def test_a_signal_handler_may_report_while_its_thread_reports() -> None:
    failure = Failure(lambda: None)
    with failure._lock:
        failure.report(KeyboardInterrupt())
    assert failure.happened
