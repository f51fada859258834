import pytest

from pipework.runtime.failure import Failure, Stopped
from pipework.runtime.loop import run_actions
from pipework.schedule import Action

ORDER = [Action("F", 0, 0), Action("F", 1, 0), Action("B", 1, 0), Action("B", 0, 0)]


def test_actions_are_executed_in_order_by_the_handler_of_their_kind_and_stage() -> None:
    done: list[tuple[str, Action]] = []
    handlers = {
        (kind, stage): lambda action, name=f"{kind}{stage}": done.append((name, action))
        for kind in "FB"
        for stage in (0, 1)
    }
    finished: list[Action] = []
    failure = Failure(lambda: None)
    run_actions(ORDER, handlers, failure, finished.append)
    assert done == [("F0", ORDER[0]), ("F1", ORDER[1]), ("B1", ORDER[2]), ("B0", ORDER[3])]
    assert finished == ORDER
    assert not failure.happened


def handlers_that_raise(error: BaseException, at: Action) -> dict[tuple[str, int], object]:
    def handle(action: Action) -> None:
        if action == at:
            raise error

    return {(kind, stage): handle for kind in "FB" for stage in (0, 1)}


def test_an_exception_is_kept_with_the_name_of_its_action_and_others_are_woken() -> None:
    stopped: list[bool] = []
    failure = Failure(lambda: stopped.append(True))
    error = ValueError("odd")
    run_actions(ORDER, handlers_that_raise(error, ORDER[2]), failure)
    assert stopped == [True]
    with pytest.raises(ValueError, match="odd") as caught:
        failure.raise_first()
    assert caught.value is error
    assert error.__notes__ == ["pipework: stage 1, micro-batch 0, action B"]


def test_the_first_of_two_exceptions_is_kept() -> None:
    failure = Failure(lambda: None)
    run_actions(ORDER, handlers_that_raise(ValueError("first"), ORDER[0]), failure)
    failure.report(ValueError("second"), ORDER[1])
    with pytest.raises(ValueError, match="first"):
        failure.raise_first()


def test_a_worker_does_nothing_more_after_another_has_failed() -> None:
    failure = Failure(lambda: None)
    failure.report(ValueError(), None)
    run_actions(ORDER, {}, failure)  # an empty table of handlers would raise


def test_being_stopped_is_no_failure() -> None:
    failure = Failure(lambda: None)
    run_actions(ORDER, handlers_that_raise(Stopped(), ORDER[0]), failure)
    assert not failure.happened
