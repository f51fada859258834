"""The one loop: every schedule is a list of actions per worker, and this is what executes it."""

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
        actions: what to do, in this order.
        handlers: what an action of a (kind, stage) does. A handler waits for what it needs.
        failure: shared by all workers of a run; a worker stops before its next action when another has failed.
        finished: called after each action; None: nobody wants to know.
        starting: called before each action, likewise.
    """
    action = None
    try:
        for action in actions:
            if failure.happened:
                return
            if starting is not None:
                starting(action)
            handlers[action.kind, action.stage](action)
            if finished is not None:
                finished(action)
    except Stopped:
        return
    except (
        BaseException
    ) as error:  # SystemExit and KeyboardInterrupt, too: a thread that swallowed them would hang the caller
        failure.report(error, action)
