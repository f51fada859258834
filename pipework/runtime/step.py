"""A step: one mini-batch, run by the workers in the order of its schedule."""

from __future__ import annotations

import contextvars
import functools
import threading
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch

from pipework.autograd.tied_gradients import tied_gradients
from pipework.runtime.caller_context import Modes
from pipework.runtime.device import record_on
from pipework.runtime.failure import Failure
from pipework.runtime.out_of_memory import note_memory
from pipework.runtime.random import kernels
from pipework.runtime.random.shards import install_for_dtensors
from pipework.runtime.random.streams import RandomStream
from pipework.runtime.random.unseen_draws import LateDraws, generators_given_up
from pipework.runtime.run_spec import RunSpec
from pipework.runtime.stage.memory_meter import MemoryMeter
from pipework.runtime.stage.stage_run import StageRun
from pipework.runtime.worker import ThreadRun, WorkerRun

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from pipework.autograd.batch_versions import BatchVersions
    from pipework.runtime.caller_context import CallerContext
    from pipework.runtime.engine import Engine
    from pipework.runtime.program import Program
    from pipework.runtime.random.streams import Key
    from pipework.runtime.stage.loss import InnerLoss
    from pipework.runtime.transport import Message, Transport
    from pipework.schedule import Interval, Schedule
    from pipework.schedule.schedule import Orders


class Recorder(Protocol):
    """Receives the recorded actions of a step.

    Attributes:
        memory: whether bytes are counted, too.
    """

    @property
    def memory(self) -> bool: ...  # noqa: D102

    def begin(self, step: int, schedule: Schedule, *, loss_outside: bool) -> None:
        """A mini-batch begins."""

    def add(self, step: int, intervals: Sequence[Interval]) -> None:
        """Adds the actions of one run, in seconds of a clock that all workers share, and bytes."""


class StepOptions(NamedTuple):
    """Options of a mini-batch.

    Attributes:
        check_finite: NaN and infinities are errors.
        recorder: receives the actions; None: nothing is recorded.
        number: of this mini-batch, for the recorder.
        everywhere: whether every process gets the outputs, not only that of the last stage.
        scaler: looks for infinities among gradients; None: there is no scaler.
    """

    check_finite: bool = False
    recorder: Recorder | None = None
    number: int = 0
    everywhere: bool = False
    scaler: torch.amp.GradScaler | None = None


class Step:
    """A mini-batch.

    If the loss is computed outside, `forward` runs the schedule up to the outputs, and `backward` runs the rest, from
    the gradients of the outputs. If the loss is computed inside, `run` runs the whole schedule.

    Args:
        engine: the pipe's stages and workers.
        program: the schedule.
        context: the settings of the calling thread, such as autocast.
        key: selects the random numbers.
        options: see `StepOptions`.
        loss: computed by the last stage; None: the loss is outside.
        own_leaves: which of the caller's input tensors are leaves that require a gradient; they refuse in-place
            operations.
        input_gradients: whether any input tensor requires a gradient, in the process that reads the inputs.
        takes_gradients: whether this process wants these gradients; they are there for all.
        versions: of the caller's input tensors.
    """

    def __init__(
        self,
        engine: Engine,
        program: Program,
        context: CallerContext,
        key: Key,
        options: StepOptions,
        *,
        loss: InnerLoss | None = None,
        own_leaves: frozenset[int] = frozenset(),
        input_gradients: bool = True,
        takes_gradients: bool = True,
        versions: BatchVersions,
    ) -> None:
        self._engine = engine
        self._versions = versions
        self._program = program
        self._context = context
        # Autograd runs a backward of outputs on an accelerator on a thread of its own, where the caller's variables are
        # not set. Those of the call are kept until then, and only there: one may hold the loss, and so this step.
        late = loss is None and bool(engine.accelerators)
        self._variables = contextvars.copy_context() if late else None
        self._thread = threading.get_ident()
        self._key = key
        self._options = options
        self._loss = loss
        self._failed = False
        # Most models' inputs need no gradient, and a message for each micro-batch that says so is not free.
        self._input_gradients = input_gradients
        self._returned = [("B", -1)] if input_gradients and takes_gradients else []
        last = len(engine.placement) - 1
        engine.workers.refuse_own_thread()
        with engine.lock:  # while workers run for another thread, the slots hold what is theirs
            self._runs = {
                stage.index: StageRun(
                    stage,
                    context,
                    program.checkpointed[stage.index],
                    own_leaves=own_leaves,
                    sends_gradients=stage.index > 0 or input_gradients,
                    check_finite=options.check_finite,
                    splits=stage.index in program.schedule.split_stages,
                    loss=loss if stage.index == last else None,
                    batch=versions if stage.index == 0 and loss is None else None,
                )
                for stage in engine.stages.values()
            }
            for run in self._runs.values():
                if run.aliases.dtensor is not None or run.sharded is not None:
                    engine.refuse_over_processes(run.aliases.dtensor)
                    engine.refuse_fully_sharded(run.sharded)
            ties = tied_gradients({number: run.aliases for number, run in self._runs.items()}, engine.link)
            if options.recorder is not None and options.recorder.memory:
                for worker in engine.devices:
                    runs = self._runs_of(worker)
                    modules = [module for stage in runs for module in engine.stages[stage].modules]
                    tensors = [tensor for module in modules for tensor in (*module.parameters(), *module.buffers())]
                    # The weights that a stage computes with are not those of its modules, if FSDP shards these.
                    meter = MemoryMeter([*tensors, *(leaf for run in runs.values() for leaf in run.aliases.leaves)])
                    for run in runs.values():
                        run.meter = meter
        for number, tied in ties.items():
            self._runs[number].tied = tied
        if any(run.draws for run in self._runs.values()):
            kernels.install(each.device for each in engine.accelerators)
            install_for_dtensors()

    @property
    def stages(self) -> list[int]:
        """Those of this process, in order."""
        return list(self._runs)

    def parameters(self, stage: int) -> list[Tensor]:
        """The parameters of a stage that require a gradient."""
        return self._runs[stage].aliases.parameters

    def forward(self, inputs: Sequence[Message]) -> list[Message]:
        """Runs the forwards alone.

        Args:
            inputs: for each micro-batch, what stage 0 gets.

        Returns:
            For each micro-batch, the output of the last stage; an empty list if the last stage is in another process
            and this process does not want its outputs.
        """
        shared = None if self._options.everywhere else 0
        stages = len(self._engine.placement)
        awaited = [("F", stages)] if self._options.everywhere or self._engine.has(stages) else []
        received = self._run(self._program.forwards, [("F", 0, inputs)], awaited, is_first=True, shared_results=shared)
        return received[0] if received else []

    def backward(self, gradients: Sequence[tuple[Tensor | None, ...]], *, retain_graph: bool) -> list[Message]:
        """Runs everything after the forwards.

        Args:
            gradients: for each micro-batch, the gradient of each tensor that the last stage gave.
            retain_graph: whether this may be called again.

        Returns:
            For each micro-batch, the gradient of each tensor that stage 0 was given; an empty list if no input requires
            a gradient, or this process does not want the gradients.
        """
        if self._failed:
            raise RuntimeError(
                "the backward of this mini-batch has failed before, so its graphs are gone; "
                "call the pipe again for a new one"
            )
        self._versions.spread()
        for run in self._runs.values():
            run.aliases.take_gradients()  # a backward that wanted some parameters only left the others' gradients lying
        sent = [("B", len(self._engine.placement) - 1, [(tensors, None) for tensors in gradients])]
        with generators_given_up(), self._engine.backend.calling("backward"):
            self._engine.workers.refuse_own_thread()
            received = self._run(self._program.others, sent, self._returned, is_first=False, retain_graph=retain_graph)
        return received[0] if received else []

    def run(self, inputs: Sequence[Message], targets: Sequence[Message]) -> tuple[list[Message], list[Message]]:
        """Runs everything, with the loss inside; without grad mode the forwards alone.

        Args:
            inputs: for each micro-batch, what stage 0 gets.
            targets: for each micro-batch, what the loss compares the output with.

        Returns:
            For each micro-batch, its part of the loss (and the output, if the loss keeps it and it is here or wanted
            everywhere); and the gradient of each tensor that stage 0 was given, nothing without grad mode or if none
            requires one.
        """
        stages = len(self._engine.placement)
        sent = [("F", 0, inputs), ("target", stages - 1, targets)]
        shared = None if self._options.everywhere else 1
        if not self._context.grad:
            return self._run(self._program.forwards, sent, [("F", stages)], is_first=True, shared_results=shared)[0], []
        awaited = [("F", stages), *self._returned]
        outputs, *returned = self._run(self._program.whole, sent, awaited, is_first=True, shared_results=shared)
        return outputs, returned[0] if returned else []

    def take_gradients(self, stage: int, *, keep: bool = False) -> list[Tensor | None]:
        """The gradients of `parameters(stage)`; the caller's current stream may use them.

        Args:
            stage: which.
            keep: leave them here, too.
        """
        aliases = self._runs[stage].aliases
        gradients = aliases.gradients() if keep else aliases.take_gradients()
        self._engine.stages[stage].device.hand_over(gradients)
        return gradients

    def _runs_of(self, worker: int) -> dict[int, StageRun]:
        return {stage: run for stage, run in self._runs.items() if self._engine.placement[stage] == worker}

    def _run(
        self,
        orders: Orders,
        sent: Sequence[tuple[str, int, Sequence[Any]]],
        awaited: Sequence[tuple[str, int]],
        *,
        is_first: bool,
        retain_graph: bool = False,
        shared_results: int | None = 0,
    ) -> list[list[Message]]:
        """Runs the workers once.

        Args:
            orders: the actions of each worker.
            sent: to which kind of action and which stage something is sent, and what for each micro-batch.
            awaited: what comes out, addressed as if to an action of that kind and stage.
            is_first: this is the mini-batch's first run, in which layers go forward.
            retain_graph: whether the graphs are needed once more.
            shared_results: see `RunSpec`.

        Returns:
            For each of `awaited`, the messages of all micro-batches.
        """
        engine, recorder = self._engine, self._options.recorder
        if not engine.workers.alive:
            raise RuntimeError(
                "this mini-batch went forward before the process was forked, and its workers' threads stayed behind; "
                "call the pipe again in this process"
            )
        micro_batches = self._program.schedule.micro_batches
        differentiates = orders is not self._program.forwards
        modes = Modes.capture()
        one_thread = engine.one_thread or bool(modes)  # a mode is an object that was written for one thread
        transport = engine.backend.transport(
            RunSpec(
                self._runs,
                engine.placement,
                dict(engine.links),  # another thread's step may make one
                engine.skips,
                micro_batches,
                shared_results,
                self._input_gradients and differentiates,
                differentiates,
                self._options.scaler if differentiates else None,
                one_thread,
            )
        )
        failure = Failure(transport.stop)
        engine.backend.during(failure)
        in_context = is_first and not self._context.is_usual
        workers = self._workers(orders, transport, one_thread, retain_graph=retain_graph, in_context=in_context)
        of_threads = [([worker], worker.order) for worker in workers]
        if one_thread and len(workers) > 1:
            of_threads = [(workers, self._program.launch_order(orders))]
        settings = [each for each in (self._context if in_context else None, modes) if each]
        entering = [each.entered for each in settings]
        threads = [ThreadRun(*each, failure, entering, engine.backend.before_action) for each in of_threads]
        # A context can be entered once at a time only, and each worker needs the caller's variables: copies.
        elsewhere = self._variables if threading.get_ident() != self._thread else None
        variables = contextvars.copy_context() if elsewhere is None else elsewhere
        jobs = [functools.partial(variables.copy().run, thread) for thread in threads]
        accelerators = engine.accelerators
        completed = False
        with engine.lock:
            try:
                for device in accelerators:
                    device.wait_for_caller()
                for kind, stage, messages in sent:
                    if not engine.has(stage):
                        continue
                    send = transport.outside.sender(kind, stage)
                    for micro_batch, message in enumerate(messages):
                        send(micro_batch, message)
                late_draws = LateDraws([worker.not_held for worker in workers if worker.not_held is not None])
                engine.workers.run(jobs, lambda error: failure.report(error, None))
                late = late_draws.error()
                if late is not None:
                    failure.report(late, None)
                completed = not failure.happened
            finally:
                # Also after a failure: what was launched before still reads inputs and parameters.
                for device in accelerators:
                    device.hand_over(())
                if accelerators:
                    for way in engine.links.values():
                        if way is not None:
                            way.hand_over(received=completed)
            for each in engine.stages.values():
                each.hand_back()
            for worker in workers:
                worker.disconnect()
        if failure.happened:
            note_memory(failure.error, failure.action, list(engine.stages.values()), list(self._runs.values()))
        transport.close()
        if is_first:
            self._versions.report()
        if not (is_first and self._loss is None) and not retain_graph:
            self._versions.forget()
            self._variables = None
        if failure.happened:
            self._failed = True
            for run in self._runs.values():
                run.clear()
            failure.explain(engine.backend.explained)
            failure.raise_first()
        if recorder is not None:
            if is_first:  # not before: a mini-batch that failed is no measurement
                recorder.begin(self._options.number, self._program.schedule, loss_outside=self._loss is None)
            intervals = [interval for worker in workers for interval in worker.recorded()]
            recorder.add(self._options.number, engine.backend.all_intervals(intervals))
        received = []
        for kind, stage in awaited:
            messages = list(map(transport.outside.receiver(kind, stage), range(micro_batches)))
            for place in {device.device for device in accelerators}:  # the caller's streams have waited above
                tensors = [tensor for tensors, _ in messages for tensor in tensors]
                record_on(torch.accelerator.current_stream(place), tensors)
            received.append(messages)
        return received

    def _workers(
        self, orders: Orders, transport: Transport, one_thread: bool, *, retain_graph: bool, in_context: bool
    ) -> list[WorkerRun]:
        """The workers of this process, ready to run."""
        engine = self._engine
        workers: list[WorkerRun] = []
        drawing = {number: any(run.draws for run in self._runs_of(number).values()) for number in engine.devices}
        common = RandomStream(self._key) if one_thread and any(drawing.values()) else None
        for number, device in engine.devices.items():
            runs, stream, hold = self._runs_of(number), common, None
            if stream is None and drawing[number]:
                stream = RandomStream(self._key)
            if stream is not None and drawing[number] and device.unseen_draws is not None and stream.moves_generators:
                # A rank that saw a late draw could not tell the others before they have used the mini-batch.
                always = not engine.backend.is_whole or any(engine.stages[stage].has_random_state for stage in runs)
                hold = device.unseen_draws.hold(stream, always=always)
            worker = WorkerRun(
                number,
                runs,
                orders[number],
                device,
                transport.endpoints[number],
                stream,
                hold,
                recorded=self._options.recorder is not None,
                retain_graph=retain_graph,
                in_context=in_context,
            )
            workers.append(worker)
        return workers
