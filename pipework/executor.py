"""The executor of a pipe: runs mini-batches, from their split into micro-batches to the joined results."""

from __future__ import annotations

import contextlib
import threading
from collections import OrderedDict
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch
from torch import nn

from pipework.autograd.batch_versions import BatchVersions
from pipework.autograd.nodes import LossInside, LossOutside, UndeliveredLosses, attach
from pipework.backend import StepCall
from pipework.model import mini_batch
from pipework.model.batchnorm import DeferredBatchNorm
from pipework.model.layers import uncalled_hooks
from pipework.model.loss.check import loss_warnings
from pipework.model.loss.settings import checked_scale, may_be_other
from pipework.model.marks import has_micro_batches, in_micro_batches
from pipework.model.mini_batch import MiniBatch, required_gradients, requires_gradients
from pipework.model.row_dimensions import Layout
from pipework.model.row_warnings import OutputRows, batch_second_noticed, modules_with_batch_second
from pipework.runtime.caller_context import CallerContext
from pipework.runtime.engine import make_engine
from pipework.runtime.failure import add_note
from pipework.runtime.program import Program
from pipework.runtime.random.streams import Key
from pipework.runtime.skips.skip import Skip
from pipework.runtime.stage.execution_views import refuse_shared_statistics
from pipework.runtime.stage.loss import total
from pipework.runtime.step import Step, StepOptions
from pipework.settings import CHECK_FINITE, ONE_THREAD
from pipework.signatures import positional_names
from pipework.skip.layout import skip_edges, verify_skippables
from pipework.spot_checks import FIRST

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from torch import Tensor

    from pipework.assignment.assignment import Assignment
    from pipework.backend import Backend
    from pipework.model.sequential import TupleRule
    from pipework.planning.measuring.predict import Prediction
    from pipework.runtime.engine import Engine
    from pipework.runtime.stage.loss import InnerLoss
    from pipework.runtime.transport import Message
    from pipework.schedule import Schedule
    from pipework.settings import Settings
    from pipework.timeline import Recording


_PADDING_CHECKS: Final = 16  # mini-batches in which padded targets are looked for


class PreparedBatch(NamedTuple):
    """A mini-batch in micro-batches.

    Attributes:
        split: the inputs.
        targets: of the micro-batches; None: the loss is outside.
        loss: of the micro-batches, with their weights; None: it is outside.
    """

    split: MiniBatch
    targets: list[Message] | None
    loss: InnerLoss | None


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
        warns: whether a `PipeWarning` is given of what is probably not meant.
        recording: receives the actions of mini-batches; None: nothing is recorded.
        recorded_step: the number of the next mini-batch for it.
    """

    def __init__(
        self,
        assignment: Assignment,
        backend: Backend,
        partitions: Sequence[nn.Sequential],
        here: Sequence[int],
        settings: Settings,
        tuples: TupleRule,
    ) -> None:
        self._assignment = assignment
        self._backend = backend
        self._partitions = {stage: partitions[stage] for stage in here}
        self.settings = settings
        self.tuples = tuples
        self.warns = True
        self._layout: Layout | None = None
        self._layout_is_fixed = False
        self.recording: Recording | None = None
        self.recorded_step = 0
        self._device_types = sorted({"cpu", *(device.type for device in assignment.devices)})
        self.skips = self._skips_between(partitions)
        self._programs: dict[tuple[int, str, bool], Program] = {}
        self._expect_new_layers()
        self._undelivered = UndeliveredLosses()
        self._scaler_checks, self._padding_checks = FIRST, _PADDING_CHECKS
        self._deferred: list[DeferredBatchNorm] = []
        self._engine: Engine | None = None
        self._make_locks()

    def _expect_new_layers(self) -> None:
        """The next mini-batch that is cut shows how the layers treat rows, and whether the loss is a mean of rows."""
        self._checks_inputs = self._checks_loss = True
        self._output_rows = OutputRows()

    def _make_locks(self) -> None:
        self._engine_lock = threading.Lock()
        self._deferring = threading.Lock()

    def __getstate__(self) -> dict[str, Any]:
        """Everything but the threads, which are made again when they are needed."""
        return {**self.__dict__, "_engine": None, "recording": None, "_engine_lock": None, "_deferring": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """See `__getstate__`."""
        self.__dict__.update(state)
        self._make_locks()

    def run(
        self,
        inputs: tuple[Any, ...],
        keyword_inputs: dict[str, Any],
        target: Any,
        warnings: list[str],
        *,
        training: bool,
        return_output: bool,
        everywhere: bool,
        loss_scale: Any = None,
    ) -> Any:
        """One mini-batch; see `Pipe.forward`. The steps have their numbers in the drawing of `docs/design.md`.

        Args:
            inputs: of the call.
            keyword_inputs: likewise.
            target: likewise.
            warnings: gets the texts of warnings.
            training: the pipe's flag.
            return_output: see `Pipe.forward`.
            everywhere: whether every process gets the outputs.
            loss_scale: see `Pipe.forward`.
        """
        # 1. This process reads what it needs of the call, and cuts the inputs into micro-batches.
        device = self._devices[-1]
        scale = checked_scale(loss_scale, device)
        context = CallerContext.capture(self._device_types)
        call_inputs = inputs, keyword_inputs
        # Of several processes one reads the inputs; the others may want their gradients.
        reads = self._backend.is_first or (
            context.grad and any(map(requires_gradients, (*inputs, *keyword_inputs.values())))
        )
        own, cut_target = None, target
        if reads or (self._backend.is_last and target is not None):
            own, cut_target = self._read(inputs, keyword_inputs, target, cuts=reads)
        if self._engine is None:
            warnings += uncalled_hooks(self._partitions.values())
        engine = self.engine_in_use()
        if context.is_checkpointing:
            self._refuse_checkpoint_around([] if own is None else own.tensors)
        if self._backend.is_whole:  # of several processes each knows its own layers only, but all know the pipe's flag
            training = any(layer.training for partition in self._partitions.values() for layer in partition)
        gradients = required_gradients(own) if own is not None and context.grad else 0

        # 2. All processes know the call.
        call = StepCall(
            training=training,
            grad=context.grad,
            everywhere=everywhere,
            returns_output=return_output,
            recorded=self.recording is not None,
            scales_loss=loss_scale is not None,
            has_target=target is not None,
            gradients=gradients,
        )
        split = own if self._backend.is_first else None
        call = self._backend.begin(call, split, call_inputs, target)
        split = split or MiniBatch.elsewhere(call.rows, call.micro_batches, call.given)  # another process has it
        own = own or split

        # 3. The targets are cut likewise, the schedule is looked up, and the losses get their weights.
        trains, warns, settings = training and context.grad, self.warns, self.settings
        targets, weighing = None, split.rows
        if call.has_target and self._backend.is_last:
            targets, weighing = split.targets(cut_target, device, self._end_ranks, self._known_layout)
        try:
            mode = self.settings.checkpoint if trains else "never"
            program = self._program(len(split.rows), mode, inside=call.has_target)
        except ValueError as error:  # a schedule of the caller's own is for fewer micro-batches
            raise self._backend.common_error(error) from None
        self._refuse_wrong_target(program, call)
        shows = warns and split.is_cut and len(split.rows) > 1  # how the layers and the loss treat rows
        inner, padding = None, None
        if call.has_target:
            if targets is not None and warns and self._padding_checks > 0:
                padding = settings.padding_warning(targets, weighing)
                self._padding_checks = 0 if padding else self._padding_checks - 1
            checks_loss = shows and self._checks_loss and targets and may_be_other(settings.loss_fn)
            seen = list[Any]() if checks_loss else None
            inner = settings.inner(
                targets, weighing, device, grad=context.grad, keeps_output=return_output, scale=scale, seen=seen
            )

        # 4. The workers run the schedule: all of it, or up to the outputs if the loss is outside.
        key = Key(call.key)
        if training:
            key.value()
        with self._engine_lock:  # before Step(), which waits for the mini-batches of other threads
            number = self.recorded_step
            self.recorded_step += 1
        finite = CHECK_FINITE in self.settings.debug
        step = Step(
            engine,
            program,
            context,
            key,
            StepOptions(finite, self.recording, number, everywhere, settings.grad_scaler),
            loss=inner,
            own_leaves=split.own_leaves,
            input_gradients=call.gradients != 0,
            takes_gradients=gradients != 0,
            versions=BatchVersions(split.tensors, split.slices),
        )
        returned: list[Message] = []
        try:
            with contextlib.ExitStack() as stack:
                if self._deferred:
                    stack.enter_context(self.mini_batch_of_batch_norms(engine.lock))
                if shows and self._checks_inputs:
                    stack.enter_context(self._rows_watched(engine.lock, split.rows, warnings))
                if inner is None:
                    results = step.forward(split.micro_batches)
                else:
                    results, returned = step.run(split.micro_batches, targets or [])
        except Exception as error:
            for doubt in () if own.learned is None else own.learned.doubts:  # which may be why
                add_note(error, doubt)
            raise
        self._backend.share_key(call, key)
        if own.learned is not None:  # not before: a call that fails has shown nothing
            self._known_layout.learn(own.learned)
            warnings += own.learned.doubts if warns and self._backend.is_first else []

        # 5. The caller's graph gets the loss, or the joined outputs.
        rooted = not self._backend.is_whole
        if inner is not None:
            # A process that has nothing to train may leave its backward out.
            has_backward = trains and (gradients != 0 or any(map(step.parameters, step.stages)))
            shared = LossInside(
                step,
                own.pieces.join,
                returned,
                inner.scale_in(results[0][0][0].dtype),
                self._backend.expect_backward() if has_backward else None,
                lacks_scaler=has_backward and loss_scale is None and self._lacks_scaler(step, context),
            )
            if warns and has_backward:
                warnings += self._undelivered.doubts()
                self._undelivered.add(shared)
            warnings += loss_warnings(settings, inner, split.rows, padding)
            self._checks_loss &= not shows
            parts = [tensors[0] for tensors, _ in results]
            loss = total(parts)
            if any(part.requires_grad for part in parts):
                end = None if shared.arrived is None else shared.end
                (loss,) = attach(shared, own.tensors, (loss,), (True,), step.stages, rooted=rooted, arrived=end)
            if not return_output:
                return loss
            has_output = everywhere or self._backend.is_last
            results = [(tensors[1:], structure) for tensors, structure in results] if has_output else []
        output = None
        if results:
            joined = split.joined(results)
            if warns and split.is_cut:
                warnings += self._output_rows.warnings(results, split.rows)
            tensors = joined.tensors
            if inner is None and context.grad and any(joined.differentiable):
                backward = LossOutside(step, cut=joined.cut, join=own.pieces.join)
                tensors = attach(backward, own.tensors, tensors, joined.differentiable, step.stages, rooted=rooted)
            output = joined.value(tensors)
        return output if inner is None else (loss, output)

    @property
    def _devices(self) -> Sequence[torch.device]:
        """The device of each stage."""
        return self._assignment.partitioning.devices

    @property
    def _end_ranks(self) -> tuple[int | None, int | None]:
        """The ranks of the first stage, which reads inputs, and of the last one, which reads targets."""
        placement = self._assignment.placement
        return self._backend.rank_of(placement[0]), self._backend.rank_of(placement[-1])

    def _refuse_wrong_target(self, program: Program, call: StepCall) -> None:
        """Raises an error if a target is missing, or where nobody reads it, or if what it is needed for is asked for.

        Args:
            program: of the mini-batch.
            call: what all processes know of it.
        """
        first, last = self._end_ranks
        loss, error, trains = self.settings, None, call.training and call.grad
        if trains and not call.has_target and not program.loss_may_be_outside:
            error = loss.missing_target(program.schedule.name, reader=last)
        elif trains and not call.has_target and last is not None and not call.everywhere:
            error = loss.outside_of_one_rank(last)
        elif call.target_is_unread:
            error = ValueError(
                f"a target was given on rank {first}, and none on rank {last}, which has the last stage and reads it: "
                "give it there"
            )
        elif call.returns_output and not call.has_target:
            error = ValueError(
                "return_output=True is for pipe(x, target=y), which returns the loss: without a target the output is "
                "what the pipe returns"
            )
        elif call.scales_loss and not call.has_target:
            error = ValueError(
                "loss_scale= multiplies the loss of pipe(x, target=y), and there is no target: multiply a loss that is "
                "computed outside of the pipe yourself"
            )
        if error is not None:
            raise self._backend.common_error(error)

    def _lacks_scaler(self, step: Step, context: CallerContext) -> bool:
        """Whether float16 gradients were computed without a scale; looked at in the first training steps."""
        if self.settings.grad_scaler is not None or not self._scaler_checks:
            return False
        self._scaler_checks -= 1
        dtypes = {parameter.dtype for stage in step.stages for parameter in step.parameters(stage)}
        return torch.float16 in dtypes.union(dtype for _, dtype, _ in context.autocasts)

    def prepared(
        self, inputs: tuple[Any, ...], keyword_inputs: dict[str, Any], target: Any, *, grad: bool, keeps_output: bool
    ) -> PreparedBatch:
        """A mini-batch in micro-batches, to be run without the workers, in a process that reads inputs and target."""
        split, target = self._read(inputs, keyword_inputs, target, cuts=True)
        assert split is not None
        if target is None:
            return PreparedBatch(split, None, None)
        device = self._devices[-1]
        targets, weighing = split.targets(target, device, layout=self._known_layout)
        loss = self.settings.inner(targets, weighing, device, grad=grad, keeps_output=keeps_output)
        return PreparedBatch(split, targets, loss)

    def predict(
        self, inputs: tuple[Any, ...], keyword_inputs: dict[str, Any], target: Any, **options: Any
    ) -> Prediction:
        """See `Pipe.predict`, which has the options."""
        from pipework.planning.measuring.predict import predict_step  # a step needs nothing of planning

        batch = self.prepared(inputs, keyword_inputs, target, grad=True, keeps_output=False)
        count = len(batch.split.micro_batches)
        plain = Program(self._assignment.schedule(count))
        if target is None and not plain.loss_may_be_outside:
            raise self.settings.missing_target(plain.schedule.name, call="pipe.predict")
        schedule = self._program(count, self.settings.checkpoint, inside=target is not None).schedule
        stages = list(self._partitions.values())
        return predict_step(stages, self._devices, schedule, *batch, self.tuples, **options)

    def schedule(self, micro_batches: int | None) -> Schedule:
        """See `Pipe.schedule`."""
        count = self.settings.chunks if micro_batches is None else micro_batches
        outside = self.settings.loss_fn is None and self.loss_may_be_outside(count)
        return self._program(count, self.settings.checkpoint, inside=not outside).schedule

    def loss_may_be_outside(self, micro_batches: int) -> bool:
        """Whether the schedule of so many micro-batches has all backwards after all forwards."""
        return self._program(micro_batches, self.settings.checkpoint, inside=False).loss_may_be_outside

    def layer_replaced(self) -> None:
        """The stages still run the layer that was there before: the next mini-batch makes and checks them again."""
        self._engine = None
        self._expect_new_layers()
        self._layout = self._layout if self._layout_is_fixed else None

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
                self._deferred = [module for module in self._layers.modules() if isinstance(module, DeferredBatchNorm)]
                self._engine = make_engine(
                    self._partitions,
                    self._assignment.partitioning.balance,
                    self._devices,
                    self._assignment.placement,
                    self.skips,
                    backend=self._backend,
                    tuples=self.tuples,
                    loss=self.settings.loss_fn if isinstance(self.settings.loss_fn, nn.Module) else None,
                    one_thread=ONE_THREAD in self.settings.debug,
                )
                self._backend.use(self._engine.workers)
            return self._engine

    @property
    def _layers(self) -> nn.Sequential:
        """The layers of this process in one module, under their names."""
        return nn.Sequential(OrderedDict(pair for part in self._partitions.values() for pair in part._modules.items()))

    def _skips_between(self, partitions: Sequence[nn.Sequential]) -> list[Skip]:
        # The stages of a process share its device; those of threads may share a device with other workers.
        places = self._devices if self._backend.is_whole else self._assignment.placement
        return [Skip(edge.key, edge.source, edge.destinations, tuple(places)) for edge in skip_edges(partitions)]

    def _program(self, micro_batches: int, checkpoint: str, *, inside: bool) -> Program:
        """The schedule, ready for the runtime; made once for each number of micro-batches that occurs."""
        key = (micro_batches, checkpoint, inside)
        if key not in self._programs:
            schedule = self._assignment.recomputing(micro_batches, checkpoint, loss_outside=not inside)
            program = self._checked(schedule)
            self._programs[key] = self._backend.program(program, self.skips)
        return self._programs[key]

    def _checked(self, schedule: Schedule) -> Program:
        """The program of a schedule; a subclass may change the order."""
        return Program.of(schedule)

    def know(self, layout: Layout) -> None:
        """What a sample says of the arguments."""
        self._layout, self._layout_is_fixed = layout, True

    @property
    def _known_layout(self) -> Layout:
        """What is known of the arguments; of a pipe's own layers the first mini-batch tells."""
        if self._layout is None:
            first = next(iter(self._layers), None)
            self._layout = Layout(() if first is None or not self._backend.is_first else positional_names(first))
        return self._layout

    def _read(
        self, inputs: tuple[Any, ...], keyword_inputs: dict[str, Any], target: Any, *, cuts: bool
    ) -> tuple[MiniBatch | None, Any]:
        """The inputs in micro-batches, or None unless `cuts`, and the target as the function of `split=` cuts it."""
        if self.settings.split is not None and not has_micro_batches(inputs, keyword_inputs):
            inputs, keyword_inputs, target = in_micro_batches(
                self.settings.split, inputs, keyword_inputs, target, self.settings.chunks
            )
        return self._split(inputs, keyword_inputs) if cuts else None, target

    def _split(self, inputs: tuple[Any, ...], keyword_inputs: dict[str, Any]) -> MiniBatch:
        """The mini-batch in micro-batches."""
        if not keyword_inputs:
            self._backend.check_inputs(inputs)
        device = self._devices[0]
        return mini_batch.split(inputs, keyword_inputs, self.settings.chunks, device, self._known_layout)

    def _refuse_checkpoint_around(self, inputs: Iterable[Tensor]) -> None:
        """Raises a RuntimeError if autograd saves tensors, whose hooks would call the pipe on one of its workers."""
        if any(tensor.requires_grad for tensor in (*inputs, *self._layers.parameters())):
            raise RuntimeError(
                "the pipe is called inside of torch.utils.checkpoint.checkpoint(..., use_reentrant=False), which would "
                "call it again in the middle of its own backward: leave it out; a pipe recomputes by itself, as "
                "Pipe(checkpoint='except_last') or 'always' says; in a layer torch.utils.checkpoint works as usual"
            )

    @contextlib.contextmanager
    def mini_batch_of_batch_norms(self, lock: threading.Lock) -> Iterator[None]:
        """Deferred batch norms collect what passes inside, and commit it unless that fails."""
        with self._deferring:  # another thread's mini-batch must not begin in between
            for batch_norm in self._deferred:
                batch_norm.begin_mini_batch()
            try:
                yield
                with lock:  # in a recomputation copies stand in for the running statistics
                    for batch_norm in self._deferred:
                        batch_norm.commit()
            finally:
                for batch_norm in self._deferred:
                    batch_norm.abandon()

    @contextlib.contextmanager
    def _rows_watched(self, lock: threading.Lock, rows: Sequence[int], warnings: list[str]) -> Iterator[None]:
        """For the first mini-batch that is cut: looks for uses in which dimension 0 is not that of the rows."""
        with batch_second_noticed(modules_with_batch_second(self._layers.named_children()), {*rows}, lock) as found:
            yield
        self._checks_inputs = False
        warnings += found
