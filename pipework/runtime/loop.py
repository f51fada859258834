"""The loop of a worker, which executes its list of actions; every schedule is such a list per worker."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipework.runtime.failure import Stopped

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from pipework.runtime.failure import Failure
    from pipework.schedule import Action


def run_actions(
    actions: Iterable[Action],
    handlers: Mapping[tuple[str, int], Callable[[Action], None]],
    failure: Failure,
    finished: Callable[[Action], None] | None = None,
    starting: Callable[[Action], None] | None = None,
) -> None:
    """Executes a worker's actions in order. Never raises: the first exception of all workers is kept in `failure`.

    Args:
        actions: in the order of execution.
        handlers: by (kind, stage), the function that executes an action; it waits for the values that it needs.
        failure: shared by all workers of a run; a worker stops before its next action when another has failed.
        finished: called after each action, if given.
        starting: called before each action, if given.
    """
    action = None
    try:
        for action in actions:
            if failure.happened:
                return
            if starting is not None:
                starting(action)
            handlers[action[0], action[1]](action)  # kind and stage: by their places it is faster
            if finished is not None:
                finished(action)
    except Stopped:
        return
    except BaseException as error:  # also SystemExit and KeyboardInterrupt: without them the caller would wait forever
        failure.report(error, action)
