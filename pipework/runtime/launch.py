"""What a thread does in a run: it executes the actions of one worker, or those of all.

    a thread for each worker                           one thread for all workers

    thread 0   0F0 0F1 ------- 0B0 0B1                 thread 0   0F0 0F1 1F0 1B0 1F1 1B1 0B0 0B1
    thread 1       1F0 1B0 1F1 1B1

    each executes the order of its worker, and         the order of the simulated schedule, in which
    waits for the messages of other workers            each message is sent before it is received

Each schedule runs either way, and computes the same numbers.

A mode sees every operator of its thread: `torch.utils.flop_counter.FlopCounterMode` counts them, debugging modes print
them, others replace them. Each thread has a stack of modes, so a mode of the caller would see nothing on a worker. A
mode is the user's object, written for one thread: while there is one, one thread executes the actions of all workers.
The modes in a backward are those around `loss.backward()`.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from pipework import torch_private
from pipework.autograd.aliases import standing_in
from pipework.runtime.failure import Stopped
from pipework.runtime.random import kernels
from pipework.runtime.random.streams import RandomStream
from pipework.runtime.worker import WorkerRun

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from pipework.runtime.failure import Failure
    from pipework.runtime.run_spec import RunSpec
    from pipework.runtime.transport import Handler, Transport
    from pipework.schedule import Action


class ThreadRun:
    """What one thread does in a run.

    Args:
        spec: the run.
        transport: of the run.
        numbers: of the workers whose actions the thread executes: one of them, or all.

    Attributes:
        workers: those of `numbers`.
    """

    def __init__(self, spec: RunSpec, transport: Transport, numbers: Sequence[int]) -> None:
        self._spec = spec
        self._failure = transport.failure
        self._order = spec.orders[numbers[0]] if len(numbers) == 1 else spec.program.launch_order(spec.orders)
        draws = any(run.draws for number in numbers for run in spec.of_worker(number).values())
        capture = None if spec.step.captured is None else spec.step.captured.capture
        stream = RandomStream(spec.step.key) if capture is None else capture.stream
        self._stream = stream if draws else None
        self.workers = [WorkerRun(spec, number, transport.endpoints[number], self._stream) for number in numbers]
        self._handlers: dict[tuple[str, int], Handler] = {}
        for worker in self.workers:
            self._handlers |= worker.handlers if len(numbers) == 1 else worker.on_own_device()

    def __call__(self) -> None:
        """Executes the actions; the failure keeps an exception."""
        try:
            settings = self._spec.step.context.entered() if self._spec.forward else contextlib.nullcontext()
            with settings, torch_private.modes_pushed(self._spec.modes):
                self._execute()
        except Stopped:
            pass
        except BaseException as error:  # entering or leaving a context
            self._failure.report(error)

    def _execute(self) -> None:
        runs = self._spec.runs
        # Before anything is launched on this thread, such as what gathers parameters.
        self.workers[0].device.enter_thread()
        for worker in self.workers:
            if worker.recorded is not None:
                worker.recorded.start_clock()
        own = [run.aliases for worker in self.workers for run in worker.runs.values()]
        gathered_later = [runs[action.stage].aliases for action in self._order if action.kind == "UNSHARD"]
        with standing_in(own, gathered_later), kernels.drawing_from(self._stream):
            run_actions(self._order, self._handlers, self._failure)
            if not self._failure.happened:
                for worker in self.workers:
                    worker.endpoint.finish()


def run_actions(actions: Iterable[Action], handlers: Mapping[tuple[str, int], Handler], failure: Failure) -> None:
    """Executes actions in order. Never raises: the first exception of all workers is kept in `failure`.

    Args:
        actions: in the order of execution.
        handlers: by (kind, stage), the function that executes an action; it waits for the values that it needs.
        failure: shared by all workers of a run; a worker stops before its next action when another has failed.
    """
    action = None
    try:
        for action in actions:
            if failure.happened:
                return
            handlers[action[0], action[1]](action)  # kind and stage: by their places it is faster
    except Stopped:
        return
    except BaseException as error:  # also SystemExit and KeyboardInterrupt: without them the caller would wait forever
        failure.report(error, action)
