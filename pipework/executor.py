"""The executor of a pipe: runs mini-batches, from their split into micro-batches to the joined results.

    1 read the call,      2 all processes     3 look up the         4 the workers run     5 the caller's graph gets
      cut the inputs   ->   know the call  ->   schedule, cut the ->   the schedule    ->   the loss, or the
                                                targets, weigh                              joined outputs
                                                the losses

The caller's graph begins where step 5 attaches the nodes of `autograd/nodes.py`, one for each stage; 6 is the caller's
own backward, which reaches them later:

    loss outside    4 forwards                            5 outputs <- nodes    6 the nodes let the workers go backward,
                                                                                  and hand over the gradients
    loss inside     4 forwards, losses, and backwards     5 loss <- nodes       6 the nodes hand over the gradients
"""

from __future__ import annotations

import contextlib
import threading
from collections import Counter, OrderedDict
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from pipework import torch_private
from pipework.autograd.batch_versions import BatchVersions
from pipework.autograd.nodes import LossInside, LossOutside, attach
from pipework.backend import StepCall
from pipework.model import mini_batch
from pipework.model.batchnorm import DeferredBatchNorms
from pipework.model.layers import uncalled_hooks
from pipework.model.loss.settings import checked_scale
from pipework.model.marks import has_micro_batches, in_micro_batches
from pipework.model.mini_batch import MiniBatch, requires_gradients
from pipework.model.row_dimensions import Layout
from pipework.runtime.caller_context import CallerContext
from pipework.runtime.engine import Engine
from pipework.runtime.failure import add_note
from pipework.runtime.program import Program
from pipework.runtime.random.streams import Key
from pipework.runtime.run_spec import StepSpec
from pipework.runtime.skips.skip import Skip
from pipework.runtime.stage.execution_views import refuse_shared_statistics
from pipework.runtime.stage.loss import total
from pipework.runtime.step import Step
from pipework.settings import CHECK_FINITE, ONE_THREAD
from pipework.signatures import positional_names
from pipework.skip.layout import skip_edges, verify_skippables

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from torch import Tensor

    from pipework.assignment.assignment import Assignment
    from pipework.backend import Backend
    from pipework.doubts import Doubts
    from pipework.model.sequential import TupleRule
    from pipework.planning.measuring.predict import Prediction
    from pipework.runtime.early_steps import EarlySteps
    from pipework.runtime.graphs.captured_step import CapturedStep
    from pipework.runtime.stage.loss import InnerLoss
    from pipework.runtime.transport import Message
    from pipework.schedule import Schedule
    from pipework.settings import Settings
    from pipework.timeline import Recording


class Executor:
    """Runs the mini-batches of a pipe, and lives as long as it. Its engine is made at the first one.

    Args:
        assignment: of the pipe.
        backend: where its workers are.
        partitions: the layers of all stages; only those of `here` are kept.
        here: the stages of this process.
        settings: of the pipe; may be replaced between mini-batches.
        tuples: how a tuple reaches a layer.

    Attributes:
        doubts: what is looked for in the first mini-batches.
        deferred: the deferred batch norms among the layers; there as soon as the engine is.
        layout: what is known of the arguments; that of a sample stays.
        call: what a call with a target looks like, for messages: what is called, and with which arguments.
        recording: receives the actions of mini-batches, and gives them numbers; None: nothing is recorded.
        early: is told when gradients are complete; None: nobody is.
    """

    def __init__(
        self,
        assignment: Assignment,
        backend: Backend,
        partitions: Sequence[nn.Sequential],
        here: Sequence[int],
        settings: Settings,
        tuples: TupleRule,
        doubts: Doubts,
    ) -> None:
        self._assignment = assignment
        self._backend = backend
        self._partitions = {stage: partitions[stage] for stage in here}
        self.settings = settings
        self.tuples = tuples
        self.doubts = doubts
        self.layout = Layout(positional_names(partitions[0][0]) if partitions else ())
        self.recording: tuple[Recording, Iterator[int]] | None = None
        self.early: EarlySteps | None = None
        self.call = "pipe", "x, target=y"
        self._device_types = sorted({"cpu", *(device.type for device in assignment.devices)})
        self.skips = self._skips_between(partitions)
        self._programs: dict[tuple[int, str, int | None, bool], Program] = {}
        self._engine: Engine | None = None
        self._engine_lock = threading.Lock()

    def __getstate__(self) -> dict[str, Any]:
        """Everything but the threads and what they share, which are made again when they are needed."""
        return {**self.__dict__, **dict.fromkeys(("_engine", "recording", "early", "_engine_lock", "deferred"))}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """See `__getstate__`."""
        self.__dict__.update(state, _engine_lock=threading.Lock())

    def run(
        self, inputs: tuple[Any, ...], keyword_inputs: dict[str, Any], target: Any, loss_scale: Any, call: StepCall
    ) -> tuple[Any, list[str]]:
        """One mini-batch; see `Pipe.forward`. The steps have their numbers in the drawing above.

        Args:
            inputs: of the call.
            keyword_inputs: likewise.
            target: likewise.
            loss_scale: likewise.
            call: what else this process says of it.

        Returns:
            What the pipe returns, and the texts of warnings.
        """
        # 1. This process reads what it needs of the call, and cuts the inputs into micro-batches.
        if self.early is not None:
            self.early.begin(grad=call.grad)
        loss_scale = checked_scale(loss_scale, self._devices[-1])
        context = CallerContext.capture(self._device_types)
        # Of several processes one reads the inputs; the others may want their gradients.
        cuts = self._backend.is_first or (call.grad and requires_gradients((inputs, keyword_inputs)))
        batch, cut_target = self._read(inputs, keyword_inputs, target, cuts=cuts)
        if call.training and call.grad and self._assignment.workers > 1:
            self.doubts.of_one_row(batch, self.settings.chunks)
        if self._engine is None:
            batch.warnings += uncalled_hooks(self._partitions.values())
        engine = self.engine_in_use()
        if context.is_checkpointing:
            self._refuse_checkpoint_around(batch)

        # 2. All processes know the call.
        call = call._replace(gradients=batch.required_gradients if call.grad else 0)
        if engine.captured_steps is not None and call.training and call.grad:
            with engine.lock:  # while workers run for another thread, the slots hold what is theirs
                form = engine.captured_steps.number_of(batch.micro_batches) if self._backend.is_first else 0
                call = call._replace(form=form, layers=[engine.captured_steps.number_of_layers()])
        read = batch if self._backend.is_first else None
        call = self._backend.begin(call, read, (inputs, keyword_inputs), target)
        if read is None:
            batch.cut_as(call.rows, call.micro_batches, call.given)

        # 3. The schedule is looked up, the targets are cut likewise, and the losses get their weights.
        program = self._program_for(call, len(batch.rows), keyword_inputs)
        if call.has_target:
            own_target = cut_target if self._backend.is_last else None
            loss = self._weigh(
                batch, own_target, grad=call.grad, keeps_output=call.returns_output, loss_scale=loss_scale
            )
            loss.seen = self.doubts.of_targets(batch, self.settings, graphs=engine.captured_steps is not None)

        # 4. The workers run the schedule: all of it, or up to the outputs if the loss is outside.
        key = Key(call.key)
        engine.workers.refuse_caller()
        with contextlib.ExitStack() as stack:
            if engine.captured_steps is not None:
                stack.enter_context(engine.captured_steps.turn)
            if call.grad:
                stack.enter_context(engine.claiming_host_memory(program))
            if call.training:
                key.value()
            captured = self._captured(engine, program, context, batch, call)
            step = self._step(engine, program, context, key, batch, call, captured)
            with self._watched(batch, engine.lock):
                results, of_inputs = step.run(batch.micro_batches, batch.targets or [])
                if captured is not None:
                    captured.collect()
            if captured is not None and engine.captured_steps is not None:
                with engine.lock:
                    batch.warnings += engine.captured_steps.settle(captured)
        # An error of one process in 5 must not leave its random numbers behind those of the others.
        self._backend.share_key(call, key)

        # 5. The caller's graph gets the loss, or the joined outputs.
        if call.has_target:
            return self._loss_inside(batch, call, step, results, of_inputs), batch.warnings
        return self._loss_outside(batch, call, step, results), batch.warnings

    def _captured(
        self, engine: Engine, program: Program, context: CallerContext, batch: MiniBatch, call: StepCall
    ) -> CapturedStep | None:
        """The step as graphs; None: it runs without."""
        steps, loss = engine.captured_steps, batch.loss
        if steps is None or call.layers is None:
            return None
        why = ""
        if loss is None:
            why = "the loss is outside of the pipe: give a target"
        elif torch_private.modes() or context.saved_tensor_hooks is not None or torch_private.any_global_hooks():
            why = "a mode, hooks on saved tensors or hooks on all modules are around the call"
        elif loss.seen is not None or self.doubts.looks_at_layers(batch):
            why = "the layers are looked at"
        numbers = None if loss is None else loss.form
        computes = call._replace(key=None, layers=None, recorded=False, everywhere=False)
        form = program, computes, context._replace(saved_tensor_hooks=None), numbers
        captured = steps.step(form, call.layers, batch.targets or [], self.deferred, why)
        if captured is not None and loss is not None:
            batch.loss = captured.static_loss(loss, self._devices[-1], engine.accelerators)
        return captured

    def _step(
        self,
        engine: Engine,
        program: Program,
        context: CallerContext,
        key: Key,
        batch: MiniBatch,
        call: StepCall,
        captured: CapturedStep | None,
    ) -> Step:
        recorder, number = (None, 0) if (recording := self.recording) is None else (recording[0], next(recording[1]))
        spec = StepSpec(
            context,
            key,
            BatchVersions(batch.tensors, batch.slices),
            batch.loss,
            own_leaves=batch.own_leaves,
            input_gradients=call.gradients != 0,
            takes_gradients=call.grad and batch.required_gradients != 0,
            everywhere=call.everywhere,
            check_finite=CHECK_FINITE in self.settings.debug,
            recorder=recorder,
            number=number,
            scaler=self.settings.grad_scaler,
            captured=captured,
            one_thread=engine.captured_steps is not None and engine.captured_steps.is_on,
            complete=None if self.early is None or captured is not None else self.early.complete,
        )
        return Step(engine, program, spec)

    def _loss_outside(self, batch: MiniBatch, call: StepCall, step: Step, results: list[Message]) -> Any:
        """5 if the caller computes the loss: the outputs, whose backward lets the workers go backward."""
        if not results:  # they are in another process
            return None
        outputs = batch.joined(results, self.layout)
        self.doubts.of_outputs(batch, results, self.layout)
        tensors = outputs.tensors
        if call.grad and any(outputs.differentiable):
            shared = LossOutside(step, cut=outputs.cut, join=batch.pieces.join)  # what 6 does
            rooted = not self._backend.is_whole
            tensors = attach(shared, batch.tensors, tensors, outputs.differentiable, step.stages, rooted=rooted)
        return outputs.value(tensors)

    def _loss_inside(
        self, batch: MiniBatch, call: StepCall, step: Step, results: list[Message], of_inputs: list[Message]
    ) -> Any:
        """5 if the last stage has computed the loss: its backward hands over gradients that are there already."""
        assert batch.loss is not None
        parts = [tensors[0] for tensors, _ in results]
        loss = total(parts)
        # A process that has nothing to train may leave its backward out.
        trains = call.training and call.grad
        has_backward = trains and (batch.required_gradients != 0 or any(map(step.parameters, step.stages)))
        shared = LossInside(  # what 6 does
            step,
            batch.pieces.join,
            of_inputs,
            batch.loss.seed_scale_in(parts[0].dtype),
            self._backend.expect_backward() if has_backward else None,
            lacks_scaler=has_backward and not call.scales_loss and self.doubts.lacks_scaler(step, self.settings),
            on_host=step.complete is not None,
        )
        if has_backward:
            self.doubts.of_backward(batch, shared)
        self.doubts.of_loss(batch, self.settings)
        if any(part.requires_grad for part in parts):
            arrived, rooted = None if shared.arrived is None else shared.end, not self._backend.is_whole
            (loss,) = attach(shared, batch.tensors, (loss,), (True,), step.stages, rooted=rooted, arrived=arrived)
        if not call.returns_output:
            return loss
        if not (call.everywhere or self._backend.is_last):
            return loss, None
        results = [(tensors[1:], structure) for tensors, structure in results]
        outputs = batch.joined(results, self.layout)
        self.doubts.of_outputs(batch, results, self.layout)
        return loss, outputs.value(outputs.tensors)

    @contextlib.contextmanager
    def _watched(self, batch: MiniBatch, lock: threading.Lock) -> Iterator[None]:
        """Around a run of the workers: something is learned of a mini-batch only if it does not fail."""
        try:
            with contextlib.ExitStack() as stack:
                if self.deferred.layers:
                    stack.enter_context(self.deferred.mini_batch(lock))
                if self.doubts.looks_at_layers(batch):
                    stack.enter_context(self.doubts.of_layers(batch, self._layers, lock))
                yield
        except Exception as error:
            for doubt in () if batch.learned is None else batch.learned.doubts:  # which may be why
                add_note(error, doubt)
            raise
        if batch.learned is not None:
            self.layout.learn(batch.learned)
            batch.warnings += batch.learned.doubts if self.doubts.warns and self._backend.is_first else []

    @property
    def _devices(self) -> Sequence[torch.device]:
        """The device of each stage."""
        return self._assignment.partitioning.devices

    def _program_for(self, call: StepCall, micro_batches: int, keyword_inputs: Mapping[str, Any]) -> Program:
        """The schedule for a call, which is refused if a target is missing, or what it is needed for is asked for."""
        settings, trains = self.settings, call.training and call.grad
        last = self._backend.rank_of(self._assignment.placement[-1])  # it reads the target
        try:
            program = self._program(micro_batches, inside=call.has_target, trains=trains)
            if call.has_target:
                return program
            if trains and not program.loss_may_be_outside:
                how = "{}({})".format(*self.call)
                raise settings.missing_target(program.schedule.name, call=how, reader=last, given=keyword_inputs)
            if trains and last is not None and not call.everywhere:
                raise settings.outside_of_one_rank(last)
            if call.target_is_unread:
                raise ValueError(
                    f"a target was given on the first rank of the pipe, and none on rank {last}, which reads it: give "
                    "it there"
                )
            if call.returns_output or call.scales_loss:
                raise ValueError(
                    "return_output= and loss_scale= are for pipe(x, target=y), which returns the loss: without a "
                    "target the pipe returns the output, and you compute the loss"
                )
        except ValueError as error:  # which each process finds by itself
            raise self._backend.common_error(error) from None
        return program

    def prepared(
        self, inputs: tuple[Any, ...], keyword_inputs: dict[str, Any], target: Any, *, grad: bool, keeps_output: bool
    ) -> MiniBatch:
        """A mini-batch in micro-batches, to be run without the workers, in a process that reads inputs and target."""
        batch, target = self._read(inputs, keyword_inputs, target, cuts=True)
        if target is not None:
            self._weigh(batch, target, grad=grad, keeps_output=keeps_output)
        return batch

    def _weigh(
        self, batch: MiniBatch, target: Any, *, grad: bool, keeps_output: bool, loss_scale: float | Tensor = 1.0
    ) -> InnerLoss:
        """Sets the loss of a mini-batch and its targets, which are None where another process reads them."""
        device = self._devices[-1]
        if target is not None:
            batch.cut_target(target, device, self.layout)
        loss = batch.loss = self.settings.inner(
            batch.targets, batch.weighing, device, grad=grad, keeps_output=keeps_output, loss_scale=loss_scale
        )
        return loss

    def predict(
        self, inputs: tuple[Any, ...], keyword_inputs: dict[str, Any], target: Any, **options: Any
    ) -> Prediction:
        """See `Pipe.predict`, which has the options."""
        from pipework.planning.measuring.predict import predict_step  # a step needs nothing of planning

        batch = self.prepared(inputs, keyword_inputs, target, grad=True, keeps_output=False)
        program = self._program(len(batch.rows), inside=target is not None)
        if target is None and not program.loss_may_be_outside:
            how = f"pipe.predict({self.call[1]})"
            raise self.settings.missing_target(program.schedule.name, call=how, given=keyword_inputs)
        stages = list(self._partitions.values())
        steps = self.engine_in_use().captured_steps if self.settings.graph_names and target is not None else None
        options["graphs"] = steps is not None and steps.is_on
        return predict_step(stages, self._devices, program.schedule, batch, self.tuples, **options)

    def schedule(self, micro_batches: int | None) -> Schedule:
        """See `Pipe.schedule`."""
        count = self.settings.chunks if micro_batches is None else micro_batches
        inside = self.settings.loss_fn is not None or not self._program(count, inside=False).loss_may_be_outside
        return self._program(count, inside=inside).schedule

    def refuse_during_steps(self, what: str) -> None:
        """Raises an error within `step_in_backward`."""
        if self.early is not None:
            self.early.refuse_inside(what)

    def layer_replaced(self) -> None:
        """The stages still run the layer that was there before: the next mini-batch makes and checks them again."""
        self._engine = None
        self.doubts.expect_new_layers()
        if not self.layout.is_given:
            first = self._partitions.get(0)
            self.layout = Layout(self.layout.names if first is None else positional_names(first[0]))

    def engine_in_use(self) -> Engine:
        """The stages and workers, made at the first mini-batch and again after a copy, an unpickling or a fork."""
        with self._engine_lock:  # two threads may call for the first time at once
            if self._engine is None or not self._engine.workers.alive:
                partitions = list(self._partitions.values())
                if self._backend.is_whole:
                    # Again for each engine, since replacing a layer makes a new one.
                    verify_skippables(self._layers)
                    refuse_shared_statistics(partitions)
                    self.skips = self._skips_between(partitions)
                self.deferred = DeferredBatchNorms(self._layers)
                self._engine = Engine(
                    self._partitions,
                    self._assignment,
                    self.skips,
                    self._backend,
                    tuples=self.tuples,
                    loss=self.settings.loss_fn if isinstance(self.settings.loss_fn, nn.Module) else None,
                    one_thread=ONE_THREAD in self.settings.debug,
                    graphs=self.settings.graph_names,
                )
            return self._engine

    @property
    def parameters_of_one_stage(self) -> set[int]:
        """The ids of the parameters that only one stage uses, of all processes."""
        counts = Counter(id(each) for partition in self._partitions.values() for each in partition.parameters())
        return {number for number, count in counts.items() if count == 1} - self._backend.tied_ids

    @property
    def _layers(self) -> nn.Sequential:
        """The layers of this process in one module, under their names."""
        return nn.Sequential(OrderedDict(pair for part in self._partitions.values() for pair in part._modules.items()))

    def _skips_between(self, partitions: Sequence[nn.Sequential]) -> list[Skip]:
        # The stages of a process share its device; those of threads may share a device with other workers.
        places = self._devices if self._backend.is_whole else self._assignment.placement
        return [Skip(edge.key, edge.source, edge.destinations, tuple(places)) for edge in skip_edges(partitions)]

    def _program(self, micro_batches: int, *, inside: bool, trains: bool = True) -> Program:
        """The schedule, ready for the runtime; made once for each number of micro-batches that occurs."""
        mode, keep = (self.settings.checkpoint, self.settings.keep) if trains else ("never", None)
        key = (micro_batches, mode, keep, inside)
        if key not in self._programs:
            schedule = self._assignment.complete(micro_batches, mode, keep, loss_outside=not inside)
            program = self._checked(schedule)
            self._programs[key] = self._backend.program(program, self.skips)
        return self._programs[key]

    def _checked(self, schedule: Schedule) -> Program:
        """The program of a schedule; a subclass may change the order."""
        return Program.of(schedule)

    def _read(
        self, inputs: tuple[Any, ...], keyword_inputs: dict[str, Any], target: Any, *, cuts: bool
    ) -> tuple[MiniBatch, Any]:
        """The mini-batch, whose inputs are read if `cuts`, and the target as the function of `split=` cuts it."""
        settings, reads_target = self.settings, self._backend.is_last and target is not None
        if settings.split is not None and (cuts or reads_target) and not has_micro_batches(inputs, keyword_inputs):
            inputs, keyword_inputs, target = in_micro_batches(
                settings.split, inputs, keyword_inputs, target, settings.chunks
            )
        return self._split(inputs, keyword_inputs) if cuts else MiniBatch.unread(), target

    def _split(self, inputs: tuple[Any, ...], keyword_inputs: dict[str, Any]) -> MiniBatch:
        """The mini-batch in micro-batches."""
        return mini_batch.split(inputs, keyword_inputs, self.settings.chunks, self._devices[0], self.layout)

    def _refuse_checkpoint_around(self, batch: MiniBatch) -> None:
        """Raises a RuntimeError if autograd saves tensors, whose hooks would call the pipe on one of its workers."""
        if any(tensor.requires_grad for tensor in (*batch.tensors, *self._layers.parameters())):
            raise RuntimeError(
                "the pipe is called inside of torch.utils.checkpoint.checkpoint(..., use_reentrant=False), which would "
                "call it again in the middle of its own backward: leave it out; a pipe recomputes by itself, as "
                "Pipe(checkpoint='except_last') or 'always' says; in a layer torch.utils.checkpoint works as usual"
            )
