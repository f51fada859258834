"""All workers in one thread, which launches their actions in one order.

Where kernels are asynchronous, a worker's thread only launches, and the threads of several workers wait for Python's
lock. One thread waits for nothing: in the order of the simulated starts each message has been sent before it is read.
Workers keep their devices, their streams and their random numbers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipework.runtime.loop import run_actions
from pipework.runtime.random import kernels
from pipework.runtime.worker import may_execute

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pipework.runtime.worker import RunConditions, WorkerRun
    from pipework.schedule import Action


class OneThreadRun:
    """The actions of all workers in one run.

    Args:
        workers: by the number of each stage, its worker, connected.
        order: the actions of all.
        conditions: those of all workers.
    """

    def __init__(self, workers: Sequence[WorkerRun], order: Sequence[Action], conditions: RunConditions) -> None:
        self._workers = workers
        self._order = order
        self._conditions = conditions
        self._present: WorkerRun | None = None

    def __call__(self) -> None:
        """Executes the actions; the failure keeps an exception."""
        self._conditions.run(self._execute)

    def _execute(self) -> None:
        failure, workers = self._conditions.failure, list(dict.fromkeys(self._workers))
        handlers = {place: handler for worker in workers for place, handler in worker.handlers.items()}
        finished = None if workers[0].finished is None else self._finished
        with may_execute(workers), kernels.drawing_from(None):
            run_actions(self._order, handlers, failure, finished, self._starting)
            if not failure.happened:
                for worker in workers:
                    worker.finish()

    def _starting(self, action: Action) -> None:
        worker = self._workers[action.stage]
        if worker is not self._present:
            self._present = worker
            worker.take_thread()
        if self._conditions.starting is not None:
            self._conditions.starting(action)

    def _finished(self, action: Action) -> None:
        finished = self._workers[action.stage].finished
        assert finished is not None
        finished(action)
