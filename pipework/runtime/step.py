"""One mini-batch on its way through the workers."""

from __future__ import annotations

import contextlib
import contextvars
import functools
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from pipework.runtime import random_kernels
from pipework.runtime.device import random_states_kept
from pipework.runtime.failure import Failure
from pipework.runtime.loop import run_actions
from pipework.runtime.memory import MemoryMeter
from pipework.runtime.modes import Modes, TakingTurns
from pipework.runtime.out_of_memory import note_memory
from pipework.runtime.random_stream import RandomStream
from pipework.runtime.stage_run import StageRun
from pipework.runtime.transport import LocalTransport
from pipework.schedule import split_at_loss

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from pipework.runtime.context import CallerContext
    from pipework.runtime.house import House
    from pipework.runtime.random_stream import Key
    from pipework.runtime.transport import Endpoint, Message, Transport
    from pipework.schedule import Action, Schedule


class Recorder(Protocol):
    """Who is told what the workers did and when."""

    def begin(self, step: int, schedule: Schedule) -> None:
        """A mini-batch begins."""

    def add(self, step: int, worker: int, entries: Sequence[tuple[Action, float, float, float]]) -> None:
        """A worker did these actions: (action, start and end in seconds, peak live activation bytes)."""


@dataclass(frozen=True)
class Program:
    """A schedule as it is run when the loss is outside: what comes before it, and what comes after."""

    schedule: Schedule
    forward: tuple[tuple[Action, ...], ...]
    backward: tuple[tuple[Action, ...], ...]
    recomputes: bool

    @classmethod
    def of(cls, schedule: Schedule) -> Program:
        """Checks the schedule and splits it at the loss.

        Raises:
            ScheduleError: it cannot run.
            ValueError: a worker goes forward after it has gone backward, or gradients are formed out of order.
        """
        validation = schedule.validate()
        validation.raise_if_invalid()
        if not validation.ascending:
            raise ValueError(
                f"schedule {schedule.name!r} differentiates the micro-batches of a stage in another order than "
                "0, 1, 2, ...; the sum of their gradients would not be that of the un-partitioned model. Order them."
            )
        forward, backward = split_at_loss(schedule)
        return cls(schedule, forward, backward, any(action.kind == "R" for order in backward for action in order))


class Step:
    """A mini-batch whose loss is outside.

    The schedule runs up to the outputs in `forward`, and from their gradients on in `backward`.

    Args:
        house: the pipe's stages and workers.
        program: the order of everything.
        context: what the calling thread has set.
        key: names the random numbers.
        checkpointed: micro-batches below this number are recomputed.
        own_leaves: which of the caller's input tensors are leaves that require a gradient; they refuse in-place
            operations.
        check_finite: NaN and infinities are errors.
        recorder: told about every action; None: nobody asks.
        number: of this mini-batch, for the recorder.
    """

    def __init__(
        self,
        house: House,
        program: Program,
        context: CallerContext,
        key: Key,
        checkpointed: int,
        *,
        own_leaves: frozenset[int] = frozenset(),
        check_finite: bool = False,
        recorder: Recorder | None = None,
        number: int = 0,
    ) -> None:
        self._house = house
        self._program = program
        self._context = context
        self._key = key
        self._recorder = recorder
        self._number = number
        self._failed = False
        with house.lock:  # while workers run for another thread, the slots hold what is theirs
            self._runs = [
                StageRun(stage, context, checkpointed, own_leaves=own_leaves, check_finite=check_finite)
                for stage in house.stages
            ]
        if recorder is not None:
            for worker in range(len(house.devices)):
                stages = [stage for stage, place in enumerate(house.placement) if place == worker]
                modules = [module for stage in stages for module in house.stages[stage].modules]
                meter = MemoryMeter(
                    [tensor for module in modules for tensor in (*module.parameters(), *module.buffers())]
                )
                for stage in stages:
                    self._runs[stage].meter = meter
        if any(run.draws and stage.device.stream is None for run, stage in zip(self._runs, house.stages, strict=True)):
            random_kernels.install()

    def parameters(self, stage: int) -> list[Tensor]:
        """The parameters of a stage that require a gradient."""
        return self._runs[stage].aliases.parameters

    def forward(self, inputs: Sequence[Message]) -> list[Message]:
        """Runs everything up to the loss.

        Args:
            inputs: for each micro-batch, what stage 0 gets.

        Returns:
            For each micro-batch, what the last stage gave.
        """
        stages = len(self._runs)
        return self._run(self._program.forward, ("F", 0), inputs, ("F", stages))

    def backward(self, gradients: Sequence[tuple[Tensor | None, ...]], *, retain_graph: bool) -> list[Message]:
        """Runs everything after the loss.

        Args:
            gradients: for each micro-batch, the gradient of each tensor that the last stage gave.
            retain_graph: whether this may be called again.

        Returns:
            For each micro-batch, the gradient of each tensor that stage 0 was given.
        """
        if self._failed:
            raise RuntimeError(
                "the backward of this mini-batch has failed before, so its graphs are gone; "
                "call the pipe again for a new one"
            )
        for run in self._runs:
            run.aliases.take_gradients()  # a backward that wanted some parameters only left the others' gradients lying
        last = len(self._runs) - 1
        messages = [(tensors, None) for tensors in gradients]
        return self._run(self._program.backward, ("B", last), messages, ("B", -1), retain_graph=retain_graph)

    def take_gradients(self, stage: int) -> list[Tensor | None]:
        """The gradients of `parameters(stage)` since the last call; the caller's current stream may use them."""
        gradients = self._runs[stage].aliases.take_gradients()
        self._house.stages[stage].device.hand_over(gradients)
        return gradients

    def _run(
        self,
        orders: Sequence[Sequence[Action]],
        entrance: tuple[str, int],
        messages: Sequence[Any],
        exit_: tuple[str, int],
        *,
        retain_graph: bool = False,
    ) -> list[Message]:
        house = self._house
        if not house.workers.alive:
            raise RuntimeError(
                "this mini-batch went forward before the process was forked, and its workers' threads stayed behind; "
                "call the pipe again in this process"
            )
        transport: Transport = LocalTransport(house.placement, house.links)
        failure = Failure(transport.stop)
        forward = entrance[0] == "F"
        modes = Modes.capture()
        endpoints, turn = transport.endpoints, None
        if modes:
            turn = threading.Lock()
            endpoints = [TakingTurns(endpoint, turn) for endpoint in endpoints]
        jobs = [
            _Job(self, worker, order, endpoint, failure, modes, turn, enter_context=forward, retain_graph=retain_graph)
            for worker, (order, endpoint) in enumerate(zip(orders, endpoints, strict=True))
        ]
        # A context can be entered once at a time only, and each worker needs the caller's variables: copies.
        calls = [functools.partial(contextvars.copy_context().run, job) for job in jobs]
        # In evaluation nothing moves an accelerator's default generator, and what its layers draw must be remembered.
        moved = house.devices if self._key.drawn else ()
        with house.lock, random_states_kept(moved):
            for device in house.devices:
                device.wait_for_caller()
            send = transport.outside.sender(*entrance)
            for micro_batch, (tensors, structure) in enumerate(messages):
                send(micro_batch, tensors, structure)
            house.workers.run(calls, lambda error: failure.report(error, None))
            for stage in house.stages:
                stage.hand_back()
        if failure.happened:
            self._failed = True
            note_memory(failure.error, house.stages, self._runs)
            for run in self._runs:
                run.clear()
            failure.raise_first()
        if self._recorder is not None:
            if forward:  # not before: a mini-batch that failed is no measurement
                self._recorder.begin(self._number, self._program.schedule)
            for worker, job in enumerate(jobs):
                self._recorder.add(self._number, worker, job.entries())
        for device in house.devices:
            device.hand_over(())
        received = [transport.outside.receive((*exit_, micro_batch)) for micro_batch in range(len(messages))]
        exit_device = house.stages[-1 if forward else 0].device
        exit_device.hand_over([tensor for tensors, _ in received for tensor in tensors])
        return received


class _Job:
    """One worker's list of actions, ready to be called on its thread."""

    def __init__(
        self,
        step: Step,
        worker: int,
        order: Sequence[Action],
        endpoint: Endpoint,
        failure: Failure,
        modes: Modes,
        turn: threading.Lock | None,
        *,
        enter_context: bool,
        retain_graph: bool,
    ) -> None:
        house = step._house
        self._order = order
        self._failure = failure
        self._modes = modes
        self._turn = turn
        self._context = step._context if enter_context and not step._context.is_usual else None
        self._device = house.devices[worker]
        self._marks: list[tuple[Action, Any, Any, int]] | None = None if step._recorder is None else []
        runs = [run for run, place in zip(step._runs, house.placement, strict=True) if place == worker]
        stages = [stage for stage, place in enumerate(house.placement) if place == worker]
        seeder = self._device.random_seeder() if step._key.drawn else None
        guard = house.random_guards.get(self._device.device)
        self._stream = RandomStream(step._key, seeder, guard) if any(run.draws for run in runs) else None
        for run in runs:
            run.connect(
                endpoint,
                stream=self._stream,
                started=None if self._marks is None else self._mark_start,
                retain_graph=retain_graph,
            )
        self._runs = runs
        self._meter = runs[0].meter
        self._handlers: dict[tuple[str, int], Callable[[Action], None]] = {}
        for stage, run in zip(stages, runs, strict=True):
            self._handlers["F", stage] = run.forward
            self._handlers["R", stage] = run.recompute
            self._handlers["B", stage] = run.backward

    def __call__(self) -> None:
        """Executes the actions; what goes wrong is kept in the failure."""
        try:
            with contextlib.ExitStack() as stack:
                if self._turn is not None:
                    stack.enter_context(self._turn)
                if self._context is not None:
                    stack.enter_context(self._context.entered())
                if self._stream is not None:
                    stack.enter_context(random_kernels.drawing_from(self._stream))
                if self._modes:
                    stack.enter_context(self._modes.entered())
                # On the worker's thread, where no Ctrl-C can come between putting an alias in and taking it out.
                for run in self._runs:
                    stack.enter_context(run.aliases.standing_in())
                if self._marks is None:
                    run_actions(self._order, self._handlers, self._failure)
                else:
                    self._clock = self._device.clock()
                    run_actions(self._order, self._handlers, self._failure, self._mark_end)
        except BaseException as error:  # entering or leaving a context
            self._failure.report(error, None)

    def entries(self) -> list[tuple[Action, float, float, float]]:
        """What was recorded: each action with its start and end in seconds and the peak of live activation bytes."""
        seconds = self._clock.seconds
        return [(action, seconds(start), seconds(end), size) for action, start, end, size in self._marks or ()]

    def _mark_start(self) -> None:
        self._start = self._clock.now()

    def _mark_end(self, action: Action) -> None:
        assert self._marks is not None
        self._marks.append((action, self._start, self._clock.now(), 0 if self._meter is None else self._meter.peak()))
