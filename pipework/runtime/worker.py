"""Workers in one run: a thread executes a list of actions, under the modes and settings of the caller.

Every schedule is such a list for each worker. A thread executes the actions of one worker, or those of all workers of
the process (with `debug="one_thread"`, or under a mode) in an order in which each message has been sent before it is
read.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from pipework.autograd.aliases import standing_in
from pipework.runtime.failure import Stopped
from pipework.runtime.random import kernels
from pipework.schedule import KINDS, Interval

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from contextlib import AbstractContextManager

    from pipework.autograd.aliases import Aliases
    from pipework.runtime.device import WorkerDevice
    from pipework.runtime.failure import Failure
    from pipework.runtime.random.streams import RandomStream
    from pipework.runtime.random.unseen_draws import Hold, UnseenDraws
    from pipework.runtime.stage.stage_run import StageRun
    from pipework.runtime.transport import Endpoint
    from pipework.schedule import Action


def run_actions(
    actions: Iterable[Action],
    handlers: Mapping[tuple[str, int], Callable[[Action], None]],
    failure: Failure,
    after_action: Callable[[Action], None] | None = None,
    before_action: Sequence[Callable[[Action], None]] = (),
) -> None:
    """Executes actions in order. Never raises: the first exception of all workers is kept in `failure`.

    Args:
        actions: in the order of execution.
        handlers: by (kind, stage), the function that executes an action; it waits for the values that it needs.
        failure: shared by all workers of a run; a worker stops before its next action when another has failed.
        after_action: called after each action, if given.
        before_action: called before each action.
    """
    action = None
    try:
        for action in actions:
            if failure.happened:
                return
            for call in before_action:
                call(action)
            handlers[action[0], action[1]](action)  # kind and stage: by their places it is faster
            if after_action is not None:
                after_action(action)
    except Stopped:
        return
    except BaseException as error:  # also SystemExit and KeyboardInterrupt: without them the caller would wait forever
        failure.report(error, action)


class WorkerRun:
    """One worker's part of a run.

    Args:
        worker: its number.
        runs: the worker's stages, which this connects; see `StageRun.connect`.
        order: its actions.
        device: the worker's.
        endpoint: the worker's side of the transport.
        stream: the source of the random numbers of the thread that executes the actions; None: no layer draws any.
        hold: see `StageRun.connect`.
        recorded: whether actions are recorded with their times.
        retain_graph: see `StageRun.connect`.
        in_context: see `StageRun.connect`.

    Attributes:
        handlers: by (kind, stage), the function that executes an action.
        finish: called after the last action, unless one has failed.
        not_held: what is known of layers that may draw from the generator of an accelerator while the worker does not
            hold it; None: there are none.
    """

    def __init__(
        self,
        worker: int,
        runs: Mapping[int, StageRun],
        order: Sequence[Action],
        device: WorkerDevice,
        endpoint: Endpoint,
        stream: RandomStream | None,
        hold: Hold | None,
        *,
        recorded: bool,
        retain_graph: bool,
        in_context: bool,
    ) -> None:
        self._worker = worker
        self.runs = runs
        self.order = order
        self.device = device
        self.stream = stream
        self.not_held: UnseenDraws | None = None
        if hold is None and stream is not None and stream.moves_generators and any(run.draws for run in runs.values()):
            self.not_held = device.unseen_draws
        self.is_recorded = recorded
        self._marks: list[tuple[Action, Any, Any, tuple[int, int, int]]] = []
        self.finish = endpoint.finish
        self.handlers: dict[tuple[str, int], Callable[[Action], None]] = {}
        mark = self._mark_start if recorded else None
        for stage, run in runs.items():
            handlers = run.connect(
                endpoint,
                stream=stream,
                hold=hold,
                before_computing=mark,
                retain_graph=retain_graph,
                in_context=in_context,
            )
            self.handlers |= {(kind, stage): handle for kind, handle in {**handlers, **endpoint.handlers}.items()}

    def disconnect(self) -> None:
        """After the run."""
        for run in self.runs.values():
            run.disconnect()

    def gathered_later(self) -> list[Aliases]:
        """The stages whose parameters FSDP shards, and the schedule gathers."""
        sharded = {stage: run.aliases for stage, run in self.runs.items() if run.sharded is not None}
        scheduled = {action.stage for action in self.order if action.kind == "UNSHARD"} if sharded else ()
        return [aliases for stage, aliases in sharded.items() if stage in scheduled]

    def start_clock(self) -> None:
        """For what is recorded."""
        if self.is_recorded:
            self._clock = self.device.clock()

    def _mark_start(self) -> None:
        self._start = self._clock.now()

    def mark_end(self, action: Action) -> None:
        """After an action that is recorded."""
        if action.kind in KINDS:
            end, meter = self._clock.now(), self.runs[action.stage].meter
            sizes = (0, 0, 0) if meter is None else meter.read(action.stage, action.micro_batch)
            self._marks.append((action, self._start, end, sizes))

    def recorded(self) -> list[Interval]:
        """The recorded actions, in seconds and bytes."""
        seconds = self._clock.seconds
        return [
            Interval(self._worker, action, seconds(start), seconds(end), most, held=held, sent=sent)
            for action, start, end, (most, held, sent) in self._marks
        ]


class ThreadRun:
    """The actions that one thread executes.

    Args:
        workers: whose they are.
        order: the actions.
        failure: of the run; it keeps the first exception.
        entering: the caller's settings and modes: functions that return a context each, in which the actions run.
        before_action: called before each action; None: nothing is.
    """

    def __init__(
        self,
        workers: Sequence[WorkerRun],
        order: Sequence[Action],
        failure: Failure,
        entering: Sequence[Callable[[], AbstractContextManager[None]]] = (),
        before_action: Callable[[Action], None] | None = None,
    ) -> None:
        self._workers = workers
        self._order = order
        self._failure = failure
        self._entering = entering
        self._before_action = [] if before_action is None else [before_action]
        self._by_stage = {stage: worker for worker in workers for stage in worker.runs}
        if len(workers) > 1 and any(worker.device.stream is not None for worker in workers):
            self._before_action.append(self._enter_device)

    def __call__(self) -> None:
        """Executes the actions; the failure keeps an exception."""
        try:
            with contextlib.ExitStack() as stack:
                for entered in self._entering:
                    stack.enter_context(entered())
                self._execute()
        except Stopped:
            pass
        except BaseException as error:  # entering or leaving a context
            self._failure.report(error, None)

    def _execute(self) -> None:
        workers = self._workers
        handlers = {place: handler for worker in workers for place, handler in worker.handlers.items()}
        # Before anything is launched on this thread, such as what gathers parameters.
        workers[0].device.enter_thread()
        for worker in workers:
            worker.start_clock()
        after_action = self._after_action if workers[0].is_recorded else None
        aliases = [run.aliases for worker in workers for run in worker.runs.values()]
        later = [each for worker in workers for each in worker.gathered_later()]
        with standing_in(aliases, later), kernels.drawing_from(workers[0].stream):
            run_actions(self._order, handlers, self._failure, after_action, self._before_action)
            if not self._failure.happened:
                for worker in workers:
                    worker.finish()

    def _enter_device(self, action: Action) -> None:
        """What the action launches is its worker's."""
        self._by_stage[action.stage].device.enter_thread()

    def _after_action(self, action: Action) -> None:
        self._by_stage[action.stage].mark_end(action)
