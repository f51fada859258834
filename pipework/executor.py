"""The executor of a pipe: runs mini-batches, from their split into micro-batches to the joined results."""

from __future__ import annotations

import contextlib
import threading
from collections import OrderedDict
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

from torch import nn

from pipework.autograd.batch_versions import BatchVersions
from pipework.autograd.nodes import LossInside, LossOutside, attach
from pipework.backend import StepData, StepFacts, StepHeader
from pipework.model import microbatch
from pipework.model.batchnorm import DeferredBatchNorm
from pipework.model.checkpoint import checkpointed_micro_batches
from pipework.model.given import Given, MicroBatches, given
from pipework.model.layers import doubts_about_hooks
from pipework.model.microbatch import Split
from pipework.model.rows import doubts_about_masks, modules_with_batch_second, watched
from pipework.planning.predict import predict_step
from pipework.planning.stage_copy import Sample
from pipework.runtime.caller_context import CallerContext
from pipework.runtime.engine import make_engine
from pipework.runtime.program import Program
from pipework.runtime.random.streams import Key
from pipework.runtime.skips.connections import Skip
from pipework.runtime.stage.execution_views import refuse_shared_statistics
from pipework.runtime.stage.loss import total
from pipework.runtime.step import Step, StepOptions
from pipework.schedule import with_recompute
from pipework.skip.layout import skip_edges
from pipework.skip.verify import verify_skippables
from pipework.values import nested

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    import torch
    from torch import Tensor

    from pipework.backend import Backend
    from pipework.model.loss import LossSettings
    from pipework.model.tuples import TupleRule
    from pipework.planning.plan import Plan
    from pipework.planning.predict import Prediction
    from pipework.runtime.engine import Engine
    from pipework.runtime.transport import Message
    from pipework.schedule import Schedule
    from pipework.timeline import Recording


class Executor:
    """Runs the mini-batches of a pipe, and lives as long as it. Its engine is made at the first one.

    Args:
        plan: of the pipe.
        backend: where its workers are.
        partitions: the layers of all stages; only those of `here` are kept.
        here: the stages of this process.
        tuples: how a tuple reaches a layer.
        loss: see `LossSettings`.
        chunks: see `Pipe`; may be changed between mini-batches, as `checkpoint` may.
        checkpoint: see `Pipe`.
        check_finite: see `Pipe`.

    Attributes:
        recording: receives the actions of mini-batches; None: nothing is recorded.
        recorded_step: the number of the next mini-batch for it.
    """

    warns: ClassVar[bool] = True  # of what is probably not meant; see `PipeWarning`

    def __init__(
        self,
        plan: Plan,
        backend: Backend,
        partitions: Sequence[nn.Sequential],
        here: Sequence[int],
        tuples: TupleRule,
        loss: LossSettings,
        *,
        chunks: int,
        checkpoint: str,
        check_finite: bool,
    ) -> None:
        self._plan = plan
        self._backend = backend
        self._partitions = {stage: partitions[stage] for stage in here}
        self._tuples = tuples
        self.loss = loss
        self.chunks = chunks
        self.checkpoint = checkpoint
        self._check_finite = check_finite
        self.recording: Recording | None = None
        self.recorded_step = 0
        self.skips = self._skips_between(partitions)
        self._programs: dict[tuple[int, int, bool], Program] = {}
        self._cut_before = False
        self._deferred: list[DeferredBatchNorm] = []
        self._engine: Engine | None = None
        self._make_locks()

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
        doubts: list[str],
        *,
        training: bool,
        return_output: bool,
        everywhere: bool,
    ) -> Any:
        """One mini-batch; see `Pipe.forward`. `training` is the pipe's flag; `doubts` gets what is to be warned of."""
        split = self._split(inputs, keyword_inputs) if self._backend.is_first else None
        if self._engine is None:
            doubts += doubts_about_hooks(self._partitions.values())
        engine = self.engine_in_use()
        context = CallerContext.capture({"cpu", *(device.type for device in self._plan.devices)})
        if self._backend.is_whole:  # of several processes each knows its own layers only, but all know the pipe's flag
            training = any(layer.training for partition in self._partitions.values() for layer in partition)
        header = StepHeader(
            training=training,
            grad=context.grad,
            everywhere=everywhere,
            returns_output=return_output,
            recorded=self.recording is not None,
        )
        facts = self._backend.begin(header, split, StepData(inputs, keyword_inputs, target))
        inside = facts.inside
        split = split or _elsewhere(facts)
        targets, weighing = None, split.rows
        if inside and self._backend.is_last:
            readers = (self._backend.rank_of(self._plan.placement[0]), self._backend.rank_of(self._plan.placement[-1]))
            targets, weighing = split.targets(target, self._plan.partitioning.devices[-1], readers)
        micro_batches = len(split.rows)
        checkpointed = checkpointed_micro_batches(self.checkpoint, micro_batches) if training and context.grad else 0
        try:
            program = self._program(micro_batches, checkpointed, inside=inside)
        except ValueError as error:  # a schedule of the caller's own is for fewer micro-batches
            raise self._backend.common_error(error) from None
        if not inside and training and context.grad:
            reader = self._backend.rank_of(self._plan.placement[-1])
            if not program.loss_may_be_outside:
                missing = self.loss.missing_target(program.schedule.name, len(inputs), keyword_inputs, reader=reader)
                raise self._backend.common_error(missing)
            if reader is not None and not everywhere:
                raise self._backend.common_error(self.loss.outside_of_one_rank(reader))
        inner = None
        if inside:
            inner = self.loss.inner(targets, weighing, grad=context.grad, keeps_output=return_output)
            padding = self.loss.doubt(targets, weighing) if targets is not None and self.warns else None
            doubts += [padding] if padding else []
        key = Key(facts.key)
        if training:
            key.value()
        step = Step(
            engine,
            program,
            context,
            key,
            StepOptions(
                self._check_finite,
                self.recording,
                self.recorded_step,
                everywhere=everywhere,
                scaler=self.loss.grad_scaler,
            ),
            loss=inner,
            own_leaves=split.own_leaves,
            input_gradients=any(tensor.requires_grad for tensor in split.tensors),
            versions=BatchVersions(split.tensors, split.slices),
        )
        self.recorded_step += 1
        returned: list[Message] = []
        first = not self._cut_before and self.warns and not split.is_given and micro_batches > 1
        watching = self._rows_watched(split.rows, inputs, keyword_inputs, doubts) if first else contextlib.nullcontext()
        with self._mini_batch_of_batch_norms(), watching:
            if inside:
                results, returned = step.run(split.micro_batches, targets or [])
            else:
                results = step.forward(split.micro_batches)
        self._backend.share_key(facts, key)
        rooted = not self._backend.is_whole
        if inner is not None:
            shared = LossInside(step, split.splits.join, returned, inner.scale_in(results[0][0][0].dtype))
            has_output = return_output and (everywhere or self._backend.is_last)
            loss, output = _loss_and_output(results, split, shared, has_output=has_output, rooted=rooted)
            return (loss, output) if return_output else loss
        if not results:
            return None
        joined = split.joined(results)
        tensors = joined.tensors
        if context.grad and any(joined.differentiable):
            backward = LossOutside(step, cut=joined.splits.cut, join=split.splits.join)
            tensors = attach(backward, split.tensors, tensors, joined.differentiable, step.stages, rooted=rooted)
        return joined.value(tensors)

    def predict(
        self,
        inputs: tuple[Any, ...],
        keyword_inputs: dict[str, Any],
        target: Any,
        *,
        optimizer: torch.optim.Optimizer | float | None,
        timeout: float,
        progress: Callable[[str], None] | None,
    ) -> Prediction:
        """See `Pipe.predict`."""
        devices = self._plan.partitioning.devices
        split = self._split(inputs, keyword_inputs)
        count = len(split.micro_batches)
        sizes = [sum(tensor.nbytes for tensor in tensors) for tensors, _ in split.micro_batches]
        largest = sizes.index(max(sizes))
        arguments, keywords = microbatch.arguments_of(split.micro_batches[largest])
        sample = Sample(arguments, keywords, tuples=self._tuples)
        batch = [(devices[0], sum(tensor.nbytes for tensor in split.tensors))]
        plain = Program(self._plan.schedule(count))
        if target is None and not plain.loss_may_be_outside:
            raise self.loss.missing_target(plain.schedule.name, len(inputs), keyword_inputs, call="pipe.predict")
        if target is not None:
            targets, weighing = split.targets(target, devices[-1])
            loss = self.loss.inner(targets, weighing, grad=True, keeps_output=False)
            sample = replace(sample, loss=loss, target=nested.unflatten(*targets[largest]))
            batch.append((devices[-1], sum(tensor.nbytes for tensors, _ in targets for tensor in tensors)))
        program = self._program(count, checkpointed_micro_batches(self.checkpoint, count), inside=target is not None)
        partitions = list(self._partitions.values())
        return predict_step(
            partitions,
            devices,
            program.schedule,
            sample,
            batch=batch,
            optimizer=optimizer,
            timeout=timeout,
            progress=progress,
        )

    def schedule(self, micro_batches: int | None) -> Schedule:
        """See `Pipe.schedule`."""
        count = self.chunks if micro_batches is None else micro_batches
        checkpointed = checkpointed_micro_batches(self.checkpoint, count)
        outside = self._program(count, checkpointed, inside=False)
        if self.loss.function is None and outside.loss_may_be_outside:
            return outside.schedule
        return self._program(count, checkpointed, inside=True).schedule

    def layer_replaced(self) -> None:
        """The stages still run the layer that was there before: the next mini-batch makes and checks them again."""
        self._engine = None
        self._cut_before = False

    def engine_in_use(self) -> Engine:
        """The stages and workers, made at the first mini-batch and again after a copy, an unpickling or a fork."""
        with self._engine_lock:  # two threads may call for the first time at once
            return self._opened()

    def _opened(self) -> Engine:
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
                self._plan.partitioning.balance,
                self._plan.partitioning.devices,
                self._plan.placement,
                self.skips,
                peers=self._backend.peers,
                tuples=self._tuples,
                loss=self.loss.function if isinstance(self.loss.function, nn.Module) else None,
            )
            self._backend.use(self._engine.workers)
        return self._engine

    @property
    def _layers(self) -> nn.Sequential:
        """The layers of this process in one module, under their names."""
        return nn.Sequential(OrderedDict(pair for part in self._partitions.values() for pair in part._modules.items()))

    def _skips_between(self, partitions: Sequence[nn.Sequential]) -> list[Skip]:
        # The stages of a process share its device; those of threads may share a device with other workers.
        places = self._plan.partitioning.devices if self._backend.is_whole else self._plan.placement
        return [Skip(edge.key, edge.source, edge.destinations, tuple(places)) for edge in skip_edges(partitions)]

    def _program(self, micro_batches: int, checkpointed: int, *, inside: bool) -> Program:
        """The schedule, ready for the runtime; made once for each number of micro-batches that occurs."""
        key = (micro_batches, checkpointed, inside)
        if key not in self._programs:
            plain = self._plan.schedule(micro_batches)
            program = self._checked(with_recompute(plain, checkpointed, loss_outside=not inside))
            self._programs[key] = self._backend.program(program, self.skips)
        return self._programs[key]

    def _checked(self, schedule: Schedule) -> Program:
        """The program of a schedule; a subclass may change the order."""
        return Program.of(schedule)

    def _split(self, inputs: tuple[Any, ...], keyword_inputs: dict[str, Any]) -> Split | Given:
        """The mini-batch in micro-batches."""
        if not keyword_inputs:
            self._backend.check_inputs(inputs)
        device = self._plan.partitioning.devices[0]
        if any(isinstance(value, MicroBatches) for value in (*inputs, *keyword_inputs.values())):
            return given(inputs, keyword_inputs, device)
        return microbatch.split(inputs, keyword_inputs, self.chunks, device)

    @contextlib.contextmanager
    def _mini_batch_of_batch_norms(self) -> Iterator[None]:
        """Deferred batch norms collect what passes inside, and commit it unless that fails."""
        if not self._deferred:
            yield
            return
        with self._deferring:  # another thread's mini-batch must not begin in between
            for batch_norm in self._deferred:
                batch_norm.begin_mini_batch()
            try:
                yield
            except BaseException:
                for batch_norm in self._deferred:
                    batch_norm.abandon()
                raise
            for batch_norm in self._deferred:
                batch_norm.commit()

    @contextlib.contextmanager
    def _rows_watched(
        self, rows: Sequence[int], inputs: tuple[Any, ...], keyword_inputs: dict[str, Any], doubts: list[str]
    ) -> Iterator[None]:
        """For the first mini-batch that is cut: looks for uses in which dimension 0 is not that of the rows."""
        if self._backend.is_first and len(inputs) + len(keyword_inputs) > 1:
            doubts += doubts_about_masks(inputs, keyword_inputs)
        with watched(modules_with_batch_second(self._layers.named_children()), {*rows}) as found:
            yield
        self._cut_before = True
        doubts += found


def _loss_and_output(
    results: list[Message], split: Split | Given, shared: LossInside, *, has_output: bool, rooted: bool
) -> tuple[Tensor, Any]:
    """What comes out of a mini-batch whose loss is inside."""
    parts = [tensors[0] for tensors, _ in results]
    loss = total(parts)
    if any(part.requires_grad for part in parts):
        (loss,) = attach(shared, split.tensors, (loss,), (True,), shared.step.stages, rooted=rooted)
    if not has_output:
        return loss, None
    joined = split.joined([(tensors[1:], structure) for tensors, structure in results])
    return loss, joined.value(joined.tensors)


def _elsewhere(facts: StepFacts) -> Split | Given:
    """A mini-batch whose tensors another process has."""
    return Split.elsewhere(facts.rows, facts.micro_batches) if facts.given is None else Given.elsewhere(facts.given)
