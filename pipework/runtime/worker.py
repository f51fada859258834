"""One worker in one run: the functions that execute its actions, and what is recorded of these."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pipework.runtime.stage.actions import chained
from pipework.schedule import Interval

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

    from pipework.runtime.device import WorkerDevice
    from pipework.runtime.random.streams import RandomStream
    from pipework.runtime.run_spec import RunSpec
    from pipework.runtime.stage.stage_run import StageRun
    from pipework.runtime.transport import Endpoint, Handler
    from pipework.schedule import Action


class WorkerRun:
    """One worker's part of a run.

    Args:
        spec: the run.
        number: of the worker.
        endpoint: the worker's side of the transport.
        stream: the source of the random numbers of the thread that executes the actions; None: no layer draws any.

    Attributes:
        spec, endpoint, stream: as above.
        runs: the worker's stages.
        device: the worker's.
        hold: entered by each computation that may draw from the generator of an accelerator unseen; None: by none.
        recorded: the times of its actions; None: nobody has asked for them.
        handlers: by (kind, stage), the function that executes an action.
        not_held: what is known of layers that may draw from the generator of an accelerator while the worker does not
            hold it; None: there are none.
    """

    def __init__(self, spec: RunSpec, number: int, endpoint: Endpoint, stream: RandomStream | None) -> None:
        engine = spec.engine
        self.spec, self.endpoint, self.stream = spec, endpoint, stream
        self.runs = spec.of_worker(number)
        self.device = engine.devices[number]
        self.hold = unseen = None
        if stream is not None and stream.moves_generators and any(run.draws for run in self.runs.values()):
            unseen = self.device.unseen_draws
        if stream is not None and unseen is not None:
            # A rank that saw a late draw could not tell the others before they have used the mini-batch.
            always = not engine.backend.is_whole or any(engine.stages[stage].has_random_state for stage in self.runs)
            self.hold = unseen.hold(stream, always=always)
        self.not_held = unseen if self.hold is None else None
        recorder, recorded = spec.step.recorder, None
        if recorder is not None:
            recorded = RecordedActions(number, self.device, self.runs, memory=recorder.memory)
        self.recorded = recorded
        self.handlers: dict[tuple[str, int], Handler] = {}
        for stage, run in self.runs.items():
            handlers = run.connect(self)
            for kind, handle in endpoint.handlers(handlers).items():
                if recorded is not None and kind in handlers:  # of the stage, not of the transport
                    handle = recorded.around(handle, None if run.offload is None else run.offload.ways.get(kind))
                self.handlers[kind, stage] = handle

    def on_own_device(self) -> dict[tuple[str, int], Handler]:
        """The handlers for a thread that executes the actions of other workers, too."""
        if self.device.stream is None:
            return self.handlers
        return {place: chained(self._enter, handle) for place, handle in self.handlers.items()}

    def disconnect(self) -> None:
        """After the run."""
        self.handlers.clear()  # they refer to this object
        for run in self.runs.values():
            run.disconnect()

    def _enter(self, _: Action) -> None:
        self.device.enter_thread()


@dataclass
class RecordedActions:
    """The times of one worker's actions in a run, and their bytes.

    Attributes:
        worker: its number.
        device: the worker's.
        runs: the worker's stages.
        memory: whether bytes are wanted. A captured step knows its own in any case.
        marks: each action, the marks after which it began, that of its end, and its bytes.
    """

    worker: int
    device: WorkerDevice
    runs: Mapping[int, StageRun]
    memory: bool
    marks: list[tuple[Action, list[Any], Any, tuple[int, int, int]]] = field(default_factory=list)

    def start_clock(self) -> None:
        """On the thread of the run, before the first action."""
        self._clock = self.device.clock()

    def begin(self) -> None:
        """An action computes from now on: it has begun, or it has received its inputs."""
        self._start = self._clock.now()

    def around(self, handle: Handler, stream: torch.Stream | None) -> Handler:
        """The handler, and after it a mark of its end.

        Args:
            handle: the handler.
            stream: of a copy, which begins when those before it in the stream have ended; None: the worker's.
        """

        def recorded(action: Action) -> None:
            free = [] if stream is None else [self._clock.now(stream)]
            self.begin()
            handle(action)
            end = self._clock.now(stream)
            sizes = self.runs[action.stage].sizes(action) if self.memory else (0, 0, 0)
            self.marks.append((action, [self._start, *free], end, sizes))

        return recorded

    def intervals(self) -> list[Interval]:
        """The actions, in seconds and bytes."""
        seconds, found = self._clock.seconds, []
        for action, starts, end, (most, held, sent) in self.marks:
            start = max(map(seconds, starts))
            found.append(Interval(self.worker, action, start, max(start, seconds(end)), most, held=held, sent=sent))
        return found
