"""A worker in one run: executes its list of actions, under the modes and settings of the caller."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, NamedTuple

from pipework.autograd.aliases import standing_in
from pipework.runtime.failure import Stopped
from pipework.runtime.loop import run_actions
from pipework.runtime.random import kernels
from pipework.schedule import KINDS, Interval

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable, Mapping, Sequence

    from pipework.autograd.aliases import Aliases
    from pipework.runtime.caller_context import CallerContext
    from pipework.runtime.caller_modes import Modes
    from pipework.runtime.device import WorkerDevice
    from pipework.runtime.failure import Failure
    from pipework.runtime.random.streams import RandomStream
    from pipework.runtime.random.unseen_draws import Hold, UnseenDraws
    from pipework.runtime.stage.stage_run import StageRun
    from pipework.runtime.transport import Endpoint
    from pipework.schedule import Action


class RunConditions(NamedTuple):
    """Conditions that all workers of a run share.

    Attributes:
        failure: keeps the first exception.
        context: the caller's settings, which workers enter; None: none are to be entered.
        in_context: whether the caller's settings, if they are not the usual ones, are in force during the whole run.
        modes: the caller's modes.
        turn: held by the one worker that computes, if there are modes; None: workers compute at the same time.
        starting: called before each action; None: not needed.
    """

    failure: Failure
    context: CallerContext | None
    in_context: bool
    modes: Modes
    turn: threading.Lock | None
    starting: Callable[[Action], None] | None = None

    def run(self, execute: Callable[[], None]) -> None:
        """Executes something on this thread in the caller's modes and settings. The failure keeps an exception."""
        try:
            if self.turn is None and self.context is None and not self.modes:  # the usual case
                execute()
                return
            with contextlib.ExitStack() as stack:
                if self.turn is not None:
                    stack.enter_context(self.turn)
                if self.context is not None:
                    stack.enter_context(self.context.entered())
                if self.modes:
                    stack.enter_context(self.modes.entered())
                execute()
        except Stopped:
            pass
        except BaseException as error:  # entering or leaving a context
            self.failure.report(error, None)


class WorkerRun:
    """One worker's list of actions, ready to be executed on its thread.

    Args:
        worker: its number.
        runs: the worker's stages.
        order: the actions.
        device: the worker's.
        conditions: those of all workers.
        stream: the source of the worker's random numbers; None: its layers draw none.
        hold: see `StageRun.connect`.
        recorded: whether actions are recorded with their times.

    Attributes:
        handlers: by (kind, stage), the function that executes an action.
        finish: called after the last action, unless one has failed.
        not_held: what is known of layers that may draw from the generator of an accelerator, and do not hold it; None:
            there are none.
    """

    def __init__(
        self,
        worker: int,
        runs: Mapping[int, StageRun],
        order: Sequence[Action],
        device: WorkerDevice,
        conditions: RunConditions,
        stream: RandomStream | None,
        hold: Hold | None = None,
        *,
        recorded: bool,
    ) -> None:
        self._worker = worker
        self._stages = list(runs)
        self._runs = list(runs.values())
        self._order = order
        self._device = device
        self._conditions = conditions
        self._stream = stream
        self._hold = hold
        self.not_held: UnseenDraws | None = None
        if stream is not None and stream.moves_generators and hold is None:
            self.not_held = device.unseen_draws
        self._marks: list[tuple[Action, Any, Any, tuple[int, int, int]]] | None = [] if recorded else None
        self._meter = self._runs[0].meter
        self.handlers: dict[tuple[str, int], Callable[[Action], None]] = {}
        for stage, run in runs.items():
            self.handlers["F", stage] = run.forward
            self.handlers["R", stage] = run.recompute
            self.handlers["B", stage] = run.backward
            self.handlers["I", stage] = run.input_gradient
            self.handlers["W", stage] = run.weight_gradient

    def connect(self, endpoint: Endpoint, *, retain_graph: bool) -> None:
        """Prepares the worker's stages for the run."""
        self.finish = endpoint.finish
        for kind, handler in endpoint.handlers.items():
            self.handlers.update({(kind, stage): handler for stage in self._stages})
        for run in self._runs:
            run.connect(
                endpoint,
                stream=self._stream,
                hold=self._hold,
                started=None if self._marks is None else self._mark_start,
                retain_graph=retain_graph,
                context_entered=self._conditions.in_context,
            )

    def __call__(self) -> None:
        """Executes the actions; the failure keeps an exception."""
        self._conditions.run(self._execute)

    def _execute(self) -> None:
        failure = self._conditions.failure
        with may_execute([self]), kernels.drawing_from(self._stream):
            run_actions(self._order, self.handlers, failure, self.finished, self._conditions.starting)
            if not failure.happened:
                self.finish()

    @property
    def aliases(self) -> list[Aliases]:
        """Those of the stages."""
        return [run.aliases for run in self._runs]

    def gathered_later(self) -> list[Aliases]:
        """Those of the stages that the schedule gathers."""
        for run in self._runs:
            if run.sharded is not None:  # which costs a look at the whole order
                break
        else:
            return []
        scheduled = {action.stage for action in self._order if action.kind == "UNSHARD"}
        return [run.aliases for stage, run in zip(self._stages, self._runs, strict=True) if stage in scheduled]

    def start_clock(self) -> None:
        """For what is recorded."""
        if self._marks is not None:
            self._clock = self._device.clock()

    def take_thread(self) -> None:
        """What this thread launches next is this worker's."""
        self._device.enter_thread()
        kernels.thread_stream.stream = self._stream

    @property
    def finished(self) -> Callable[[Action], None] | None:
        """Called after each action; None: not needed."""
        return None if self._marks is None else self._mark_end

    def disconnect(self) -> None:
        """After the run."""
        for run in self._runs:
            run.disconnect()

    def recorded(self) -> list[Interval]:
        """The recorded actions, in seconds and bytes."""
        seconds = self._clock.seconds
        return [
            Interval(self._worker, action, seconds(start), seconds(end), most, held=held, sent=sent)
            for action, start, end, (most, held, sent) in self._marks or ()
        ]

    def _mark_start(self) -> None:
        self._start = self._clock.now()

    def _mark_end(self, action: Action) -> None:
        assert self._marks is not None
        if action.kind not in KINDS:
            return
        end = self._clock.now()
        sizes = (0, 0, 0) if self._meter is None else self._meter.read(action.stage, action.micro_batch)
        self._marks.append((action, self._start, end, sizes))


def may_execute(workers: Sequence[WorkerRun]) -> contextlib.AbstractContextManager[None]:
    """A context in which this thread may execute the actions of some workers.

    To be entered where no Ctrl-C can come between putting an alias in and taking it out: on a worker's thread, or with
    handlers that are kept from raising.
    """
    for worker in workers:
        worker.start_clock()
    if len(workers) == 1:  # the usual case
        return standing_in(workers[0].aliases, workers[0].gathered_later())
    later = [each for worker in workers for each in worker.gathered_later()]
    return standing_in([each for worker in workers for each in worker.aliases], later)
