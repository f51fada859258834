"""The `Pipe` module: an `nn.Sequential` trained by several workers at once."""

from __future__ import annotations

import contextlib
import threading
import warnings
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from torch import nn

from pipework.autograd.batch_versions import BatchVersions
from pipework.autograd.nodes import LossInside, LossOutside, attach
from pipework.backend import LocalBackend, PipeSpec, StepData, StepFacts, StepHeader
from pipework.model import microbatch
from pipework.model.batchnorm import DeferredBatchNorm, convert_deferred_batch_norm
from pipework.model.checkpoint import MODES, checkpointed_micro_batches
from pipework.model.given import Given, MicroBatches, given
from pipework.model.layers import Layers, refuse_own_behaviour, warn_of_hooks
from pipework.model.loss import LossSettings
from pipework.model.materialize import on_meta
from pipework.model.microbatch import Split
from pipework.model.rows import doubts_about_masks, modules_with_batch_second, watched
from pipework.model.sequential import tuple_rule
from pipework.pipe_warning import PipeWarning
from pipework.planning.doubts import doubts_about
from pipework.planning.partition import split_layers
from pipework.planning.plan import make_plan
from pipework.planning.predict import Sample, predict_step
from pipework.runtime.caller_context import CallerContext
from pipework.runtime.engine import make_engine
from pipework.runtime.program import Program
from pipework.runtime.random.streams import Key, draw_key
from pipework.runtime.skips.connections import Skip
from pipework.runtime.stage.execution_views import refuse_shared_statistics
from pipework.runtime.stage.loss import total
from pipework.runtime.step import Step, StepOptions
from pipework.schedule import with_recompute
from pipework.skip.layout import skip_edges
from pipework.skip.verify import verify_skippables
from pipework.summary import table
from pipework.timeline import Recording
from pipework.timeline.recording import checked_step
from pipework.tracebacks import ShortTracebacks
from pipework.values import nested

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence, Sized

    from torch import Tensor
    from torch.distributed.device_mesh import DeviceMesh
    from torch.utils.data.distributed import DistributedSampler

    from pipework.backend import Backend, ProcessGroupView
    from pipework.distributed.mesh import Mesh
    from pipework.planning.predict import Prediction
    from pipework.runtime.engine import Engine
    from pipework.runtime.transport import Message
    from pipework.schedule import Schedule, ScheduleSpec


class Pipe(Layers):
    """Trains an `nn.Sequential` as a pipeline: its layers are cut into partitions, each mini-batch into micro-batches.

    Partitions work at the same time, each on its own device and on another micro-batch. What comes out is what the
    module itself computes, to the last bit of every gradient, micro-batch by micro-batch; outside, it is ordinary
    autograd.

    Args:
        module: the layers in order. They stay the user's own objects, with the parameter names of `module`. Those on
            the meta device are given memory where they run, and initialised by their `reset_parameters()`.
        chunks: how many micro-batches a mini-batch is split into, along dimension 0 of its tensors; a batch of fewer
            rows makes as many as it has rows. More chunks make a smaller bubble (the workers' idle share,
            (p-1)/(m+p-1) for p workers and m chunks), until a micro-batch is too small to keep a device busy.
        checkpoint: which micro-batches are computed again for their backward instead of being kept: 'always',
            'except_last' or 'never'. Training mode only.
        deferred_batch_norm: batch norms take their running statistics from the whole mini-batch instead of from each
            micro-batch in turn (see `DeferredBatchNorm`, which replaces them in `module`).
        balance: how many layers each partition has. None: as the layers lie on devices already, else chosen by their
            cost.
        devices: one for each worker, which holds one partition, or several if the schedule is one of those; numbers
            are accelerators. ["cpu", "cpu"] means two workers that really run at the same time, each with its share of
            the cores; a warning names those for which there is no partition. None: where the layers lie, else all
            accelerators, else the CPU.
        schedule: the order of what the workers do: the name of any schedule that trains, such as 'gpipe', '1f1b',
            'interleaved-1f1b', 'looped-bfs', 'zb-h1' or 'zb-v' (or of its class in torch.distributed.pipelining), a
            `Schedule` of your own, or a `ScheduleSpec` that makes one of any size. All but 'gpipe' and 'looped-bfs'
            need the loss inside, `pipe(x, target=y)`.
        loss_fn: from the output and the target of a micro-batch to its loss, a 0-dimensional tensor. None: if a target
            is given, the last layer takes it as its last positional argument and returns the loss.
        loss_reduction: 'mean': the loss of the mini-batch is the mean of its micro-batches' losses, weighted by rows;
            'sum': their sum.
        loss_weight: from a micro-batch's target to its weight in the mean, in place of its rows, such as
            `lambda target: (target != -100).sum()`. None: what `cross_entropy` or `nll_loss` counts, if `loss_fn` is
            one of them, and else the rows.
        grad_scaler: gradients carry its scale inside of the pipe already, so that small ones survive in float16; use
            it outside as always.
        check_finite: NaN or an infinity in an output or a gradient raises a FloatingPointError at once, with a note
            that says where. On an accelerator the host waits for every result to see it.
        mesh: what `pipework.init()` returned, or a `DeviceMesh`: each worker is a process, and this one holds the
            layers of its own stages only. Then the pipe is made and called by all processes alike. None: the workers
            are threads of this process.

    Raises:
        TypeError: `module` is no `nn.Sequential`.
        ValueError: `chunks`, `checkpoint` or `balance` has a value that cannot be used, or the processes disagree; the
            message says what is accepted, or what differs.
        IndexError: there are more partitions than devices.

    Example:
        >>> module = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
        >>> pipe = Pipe(module, chunks=4, balance=[2, 1], devices=["cpu", "cpu"])
        >>> output = pipe(torch.randn(16, 4))
        >>> output.square().mean().backward()
        >>> output.shape, pipe[0].weight.grad.shape
        (torch.Size([16, 2]), torch.Size([8, 4]))
    """

    _warns: ClassVar[bool] = True  # of what is probably not meant; see `PipeWarning`

    _own_attributes: ClassVar[frozenset[str]] = Layers._own_attributes | {
        "_check_finite",
        "_checkpoint",
        "_chunks",
        "_backend",
        "_deferred",
        "_deferring",
        "_defers",
        "_engine",
        "_cut_before",
        "_loss",
        "_engine_lock",
        "_plan",
        "_programs",
        "_recorded_step",
        "_recording",
        "_skips",
        "_tuples",
    }

    def __init__(
        self,
        module: nn.Sequential,
        chunks: int = 1,
        checkpoint: str = "except_last",
        deferred_batch_norm: bool = False,
        *,
        balance: Sequence[int] | None = None,
        devices: Sequence[int | str | torch.device] | None = None,
        schedule: str | Schedule | ScheduleSpec = "gpipe",
        loss_fn: Callable[[Any, Any], Tensor] | None = None,
        loss_reduction: str = "mean",
        loss_weight: Callable[[Any], Any] | None = None,
        grad_scaler: torch.amp.GradScaler | None = None,
        check_finite: bool = False,
        mesh: Mesh | DeviceMesh | None = None,
    ) -> None:
        if isinstance(chunks, bool) or not isinstance(chunks, int) or chunks < 1:
            raise ValueError(f"number of chunks must be positive integer, got {chunks!r}")
        if checkpoint not in MODES:
            raise ValueError(f"checkpoint is not one of 'always', 'except_last', or 'never': got {checkpoint!r}")
        loss = LossSettings(loss_fn, loss_reduction, loss_weight, grad_scaler)
        if isinstance(module, nn.Sequential):
            refuse_own_behaviour(module)
            verify_skippables(module)
        backend = _backend(mesh, devices)
        plan = make_plan(module, schedule, chunks, balance, backend.devices)
        here = backend.own_stages(plan)
        for doubt in doubts_about(module, plan, chunks, balance, backend.devices) if self._warns else ():
            warnings.warn(doubt, PipeWarning, stacklevel=2)
        if deferred_batch_norm:
            convert_deferred_batch_norm(module, chunks)
        stages = range(len(plan.placement))
        key = draw_key() if any(map(on_meta, module)) else None
        partitions = split_layers(module, plan.partitioning, key, here)
        refuse_shared_statistics(partitions)
        super().__init__(
            {stage: partitions[stage] for stage in here},
            [plan.partitioning.devices[stage] for stage in here],
            [sum(plan.partitioning.balance[:stage]) for stage in here],
            key,
            {name for stage in stages if stage not in here for name in partitions[stage]._modules},
        )
        self._backend = backend
        self._plan = plan
        self._skips = self._skips_between(partitions)
        settings = {
            "chunks": chunks,
            "checkpoint": checkpoint,
            "deferred_batch_norm": bool(deferred_batch_norm),
            "loss_reduction": loss_reduction,
            "loss_inside": loss_fn is not None,
            "check_finite": bool(check_finite),
            "grad_scaler": grad_scaler is not None,
            "training": module.training,
            "random key of layers on the meta device": key,
        }
        own = [*self.named_parameters(), *self.named_buffers()]
        backend.join(PipeSpec(module, plan, partitions, self._skips, settings, own, grad_scaler, self._engine_in_use))
        loss.place(self.output_device)
        self._chunks = chunks
        self._checkpoint = checkpoint
        self._check_finite = bool(check_finite)
        self._loss = loss
        self._tuples = tuple_rule(module)
        self._defers = bool(deferred_batch_norm)
        self._deferred: list[DeferredBatchNorm] = []
        self._engine: Engine | None = None
        self._engine_lock = threading.Lock()
        self._deferring = threading.Lock()
        self._recording: Recording | None = None
        self._programs: dict[tuple[int, int, bool], Program] = {}
        self._cut_before = False
        self._recorded_step = 0
        self.training = module.training

    @property
    def chunks(self) -> int:
        """How many micro-batches a mini-batch is split into."""
        return self._chunks

    @property
    def checkpoint(self) -> str:
        """Which micro-batches are computed again for their backward; `save_checkpoint` has nothing to do with it."""
        return self._checkpoint

    @property
    def balance(self) -> list[int]:
        """How many layers each partition has."""
        return list(self._plan.partitioning.balance)

    @property
    def devices(self) -> list[torch.device]:
        """The device of each worker; with one partition per worker, of each partition."""
        return list(self._plan.devices)

    @property
    def is_first(self) -> bool:
        """Whether the first stage is in this process, which then reads the inputs; others may pass None."""
        return self._backend.is_first

    @property
    def is_last(self) -> bool:
        """Whether the last stage is in this process, which then reads the targets and has the outputs."""
        return self._backend.is_last

    @property
    def data_parallel_rank(self) -> int:
        """Which of several replicas of the pipe this process belongs to; see `sampler`."""
        return self._backend.data_parallel_rank

    @property
    def data_parallel_size(self) -> int:
        """How many replicas of the pipe there are, each of which is to be given other data."""
        return self._backend.data_parallel_size

    def sampler(
        self, dataset: Sized, *, shuffle: bool = True, seed: int = 0, drop_last: bool = False
    ) -> DistributedSampler[Any]:
        """A sampler of rows for a `DataLoader`: the same rows for all ranks of a pipe, others for each of its replicas.

        Args:
            dataset: the rows.
            shuffle: whether in a new order in every epoch; call its `set_epoch(epoch)` before each.
            seed: of the order; the same on all ranks.
            drop_last: leave out rows at the end that do not fill all replicas, instead of repeating some.

        Raises:
            TypeError: it is a `DataLoader`, whose length counts batches.

        Example:
            >>> pipe = Pipe(nn.Sequential(nn.Linear(2, 2)), devices=["cpu"])
            >>> list(pipe.sampler(range(4), shuffle=False))
            [0, 1, 2, 3]
        """
        from torch.utils.data import DataLoader
        from torch.utils.data.distributed import DistributedSampler  # needs torch.distributed, which a build may lack

        if isinstance(dataset, DataLoader):
            raise TypeError(
                "pipe.sampler got a DataLoader, whose length counts batches, and wanted the dataset, whose length "
                "counts rows: DataLoader(dataset, batch_size, sampler=pipe.sampler(dataset))"
            )
        data: Any = dataset
        return DistributedSampler(
            data, self.data_parallel_size, self.data_parallel_rank, shuffle=shuffle, seed=seed, drop_last=drop_last
        )

    @property
    def ranks(self) -> ProcessGroupView:
        """The processes of the pipe and its replicas, as one of them sees them."""
        return self._backend.ranks

    @property
    def stopping(self) -> bool:
        """Whether training is to stop: a process was asked to end (SIGTERM), or `request_stop` was called.

        All processes see it after the same training step, so that they can save a checkpoint and leave together. A
        program that does not look is made to leave: the next training step raises SystemExit(143). Where workers are
        threads, signals are the program's own, and only `request_stop` counts.
        """
        return self._backend.stopping

    def request_stop(self) -> None:
        """Asks for `stopping`, in all processes; a program's signal handler may call it.

        Example:
            >>> pipe = Pipe(nn.Sequential(nn.Linear(2, 2)), balance=[1])
            >>> pipe.request_stop()
            >>> pipe.stopping
            True
        """
        self._backend.request_stop()

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False) -> Tensor:
        """Scales all gradients down so that their norm is at most a number, as `nn.utils.clip_grad_norm_` does.

        The norm is that of the gradients of the whole model, in whichever processes its layers are. All of them call
        this.

        Args:
            max_norm: the largest norm.
            norm_type: which norm; infinity is the largest absolute value.
            error_if_nonfinite: raise an error if the norm is NaN or infinite.

        Returns:
            The norm before; the same in all processes.

        Raises:
            RuntimeError: the norm is not finite, and `error_if_nonfinite` is set.

        Example:
            >>> module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
            >>> pipe = Pipe(module, chunks=4, balance=[1, 1], devices=["cpu", "cpu"])
            >>> pipe(torch.randn(8, 4)).sum().backward()
            >>> norm = pipe.clip_grad_norm_(1.0)
            >>> pipe.clip_grad_norm_(1.0) <= 1.0
            tensor(True)
        """
        return self._backend.clip_grad_norm_(self._partitions, max_norm, norm_type, error_if_nonfinite)

    def forward(
        self,
        *inputs: Any,
        target: Any = None,
        return_output: bool = False,
        outputs: Literal["last", "all"] = "last",
        **keyword_inputs: Any,
    ) -> Any:
        """Computes what the un-partitioned module would, and prepares for its backward.

        With a target the whole schedule runs, forward and backward, and the loss is returned; its `backward()` delivers
        the gradients, which are there already.

        Args:
            inputs: go to the first layer, moved to its device. Tensors are split along dimension 0, everything else
                goes to every micro-batch as it is. `MicroBatches` are split already.
            target: what the loss compares the output with, any nested structure, moved to the last device and split
                like the inputs, or `MicroBatches` like these. None: the loss is computed outside.
            return_output: return loss and output.
            outputs: if workers are processes: 'last' returns outputs in that of the last stage, and None in all others;
                'all' returns them everywhere.
            keyword_inputs: like `inputs`.

        Returns:
            With a target the loss of the mini-batch, 0-dimensional; if `return_output`, a pair of it and the output,
            which has no graph. Without one the last layer's output, on the last device: tensors are concatenated over
            the micro-batches (0-dimensional ones averaged by rows), other values collected in a list. If the inputs are
            `MicroBatches`, so are the outputs.

            If workers are processes, all of them return the same loss.

        Raises:
            TypeError: there is no tensor among the inputs, or the loss is no tensor.
            ValueError: a tensor cannot be split, tensors have different numbers of rows or arguments different numbers
                of micro-batches, rows cannot weigh the mean, the schedule needs a target, or the loss has dimensions.
        """
        if outputs not in ("last", "all"):
            raise ValueError(f"outputs is not one of 'last' or 'all': got {outputs!r}")
        if return_output and self._loss.function is None and (target is not None or not self.is_last):
            raise ValueError(
                "the last layer returns the loss, so there is no output to return: give the pipe a loss_fn"
            )
        if not self._modules:
            if target is not None:
                raise ValueError("a pipe without layers has no loss: leave the target out")
            return nn.Sequential()(*inputs, **keyword_inputs)
        warn_of_hooks(self.partitions)
        what = "training step" if self.training and torch.is_grad_enabled() else "evaluation"
        with ShortTracebacks(), self._backend.calling(what):
            return self._run(inputs, keyword_inputs, target, return_output=return_output, outputs=outputs)

    def _run(
        self,
        inputs: tuple[Any, ...],
        keyword_inputs: dict[str, Any],
        target: Any,
        *,
        return_output: bool,
        outputs: Literal["last", "all"],
    ) -> Any:
        """One mini-batch; see `forward`."""
        if return_output and target is None and self.is_last:
            raise ValueError(
                "return_output=True is for pipe(x, target=y), which returns the loss: without a target the "
                "output is what the pipe returns"
            )
        self._refuse_to_run_without_data()
        split = self._split(inputs, keyword_inputs) if self.is_first else None
        engine = self._engine_in_use()
        context = CallerContext.capture({"cpu", *(device.type for device in self._plan.devices)})
        everywhere = outputs == "all"
        header = StepHeader(
            # Of several processes each knows its own layers only, but all know the pipe's flag.
            training=any(layer.training for layer in self) if self._backend.is_whole else self.training,
            grad=context.grad,
            everywhere=everywhere,
            returns_output=return_output,
            recorded=self._recording is not None,
        )
        facts = self._backend.begin(header, split, StepData(inputs, keyword_inputs, target))
        training, inside = header.training, facts.inside
        split = split or _elsewhere(facts)
        targets, weighing = None, split.rows
        if inside and self.is_last:
            readers = (self._backend.rank_of(self._plan.placement[0]), self._backend.rank_of(self._plan.placement[-1]))
            targets, weighing = split.targets(target, self.output_device, readers)
        micro_batches = len(split.rows)
        checkpointed = checkpointed_micro_batches(self._checkpoint, micro_batches) if training and context.grad else 0
        try:
            program = self._program(micro_batches, checkpointed, inside=inside)
        except ValueError as error:  # a schedule of the caller's own is for fewer micro-batches
            raise self._backend.common_error(error) from None
        if not inside and training and context.grad:
            reader = self._backend.rank_of(self._plan.placement[-1])
            if not program.loss_may_be_outside:
                missing = self._loss.missing_target(program.schedule.name, len(inputs), keyword_inputs, reader=reader)
                raise self._backend.common_error(missing)
            if reader is not None and not everywhere:
                raise self._backend.common_error(self._loss.outside_of_one_rank(reader))
        inner = None
        if inside:
            inner = self._loss.inner(targets, weighing, grad=context.grad, keeps_output=return_output)
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
                self._recording,
                self._recorded_step,
                everywhere=everywhere,
                scaler=self._loss.grad_scaler,
            ),
            loss=inner,
            own_leaves=split.own_leaves,
            input_gradients=any(tensor.requires_grad for tensor in split.tensors),
            versions=BatchVersions(split.tensors, split.slices),
        )
        self._recorded_step += 1
        returned: list[Message] = []
        first = not self._cut_before and self._warns and not split.is_given and micro_batches > 1
        watching = self._rows_watched(split.rows, inputs, keyword_inputs) if first else contextlib.nullcontext()
        with self._mini_batch_of_batch_norms(), watching:
            if inside:
                results, returned = step.run(split.micro_batches, targets or [])
            else:
                results = step.forward(split.micro_batches)
        self._backend.share_key(facts, key)
        rooted = not self._backend.is_whole
        if inner is not None:
            shared = LossInside(step, split.splits.join, returned, inner.scale_in(results[0][0][0].dtype))
            has_output = return_output and (everywhere or self.is_last)
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

    @contextlib.contextmanager
    def record(self, step: int | None = None) -> Iterator[Recording]:
        """Records what the workers do, and when, for every mini-batch inside the context.

        Recording also counts the memory that autograd keeps, which costs a few microseconds an operator: it is meant
        for one mini-batch now and then. If workers are processes, all of them record, and each gets the whole picture.

        Args:
            step: the number of the first mini-batch inside, in the caller's own counting; pictures show it, and the
                next ones follow. None: the recording counts its mini-batches from 0.

        Raises:
            ValueError: the number is negative, or not an integer.

        Example:
            >>> module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
            >>> pipe = Pipe(module, chunks=2, balance=[1, 1], devices=["cpu", "cpu"])
            >>> with pipe.record() as timeline:
            ...     pipe(torch.randn(8, 4)).sum().backward()
            >>> timeline.timeline().workers
            2
        """
        recording, before = Recording(counts=step is None), (self._recording, self._recorded_step)
        self._recording, self._recorded_step = recording, 0 if step is None else checked_step(step)
        try:
            yield recording
        finally:
            self._recording, self._recorded_step = before

    def predict(
        self,
        *inputs: Any,
        target: Any = None,
        timeout: float = 0.5,
        progress: Callable[[str], None] | None = None,
        **keyword_inputs: Any,
    ) -> Prediction:
        """Says how long a training step will take and how much memory each stage will need, before there was one.

        Each stage runs its part of one micro-batch forward and backward on a copy, by itself; nothing of the pipe
        changes. The schedule is then simulated with what was measured. Workers that run at the same time may slow
        each other down, which this does not know.

        Args:
            inputs: of a mini-batch, as for the pipe itself. All micro-batches are taken to be like the largest one.
            target: likewise; None: the loss is outside.
            timeout: for how many seconds to measure each stage.
            progress: called with a line for each stage, such as `print`; None: lines are logged to "pipework" (INFO).
            keyword_inputs: like `inputs`.

        Raises:
            TypeError: as for the pipe itself.
            ValueError: as for the pipe itself, or there are no layers.

        Example:
            >>> module = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
            >>> pipe = Pipe(module, chunks=4, balance=[2, 1], devices=["cpu", "cpu"])
            >>> prediction = pipe.predict(torch.randn(16, 4), timeout=0)
            >>> [stage.weights for stage in prediction.stages]
            [160, 72]
        """
        if not self._modules:
            raise ValueError("a pipe without layers does nothing that could be predicted")
        if not self._backend.is_whole:
            raise ValueError("predict runs all stages in one process: make a pipe without a mesh to have it predicted")
        self._refuse_to_run_without_data()
        split = self._split(inputs, keyword_inputs)
        count = len(split.micro_batches)
        sizes = [sum(tensor.nbytes for tensor in tensors) for tensors, _ in split.micro_batches]
        largest = sizes.index(max(sizes))
        arguments, keywords = microbatch.arguments_of(split.micro_batches[largest])
        sample = Sample(arguments, keywords, tuples=self._tuples)
        plain = Program(self._plan.schedule(len(split.micro_batches)))
        if target is None and not plain.loss_may_be_outside:
            raise self._loss.missing_target(plain.schedule.name, len(inputs), keyword_inputs, call="pipe.predict")
        if target is not None:
            targets, weighing = split.targets(target, self.output_device)
            loss = self._loss.inner(targets, weighing, grad=True, keeps_output=False)
            sample = replace(sample, loss=loss, target=nested.unflatten(*targets[largest]))
        return predict_step(
            self.partitions,
            self._plan.partitioning.devices,
            self._program(
                count, checkpointed_micro_batches(self._checkpoint, count), inside=target is not None
            ).schedule,
            sample,
            timeout=timeout,
            progress=progress,
        )

    def __repr__(self) -> str:
        """A table of the partitions."""
        return table(self)

    def schedule(self, micro_batches: int | None = None) -> Schedule:
        """The order of all actions of a training mini-batch.

        Args:
            micro_batches: their number; None: `chunks`.
        """
        count = self._chunks if micro_batches is None else micro_batches
        checkpointed = checkpointed_micro_batches(self._checkpoint, count)
        outside = self._program(count, checkpointed, inside=False)
        if self._loss.function is None and outside.loss_may_be_outside:
            return outside.schedule
        return self._program(count, checkpointed, inside=True).schedule

    def _prepared(self, layer: nn.Module) -> nn.Module:
        self._engine = None  # its stages run the layer that was there before; whether it fits is checked for the next
        self._cut_before = False
        return convert_deferred_batch_norm(layer, self._chunks) if self._defers else layer

    def __getstate__(self) -> dict[str, Any]:
        """For copies and pickles: everything but the threads, which are made again when they are needed."""
        self._backend.check_copyable()
        return {**self.__dict__, "_engine": None, "_recording": None, "_engine_lock": None, "_deferring": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """See `__getstate__`."""
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._engine_lock = threading.Lock()
        self._deferring = threading.Lock()

    def _split(self, inputs: tuple[Any, ...], keyword_inputs: dict[str, Any]) -> Split | Given:
        """The mini-batch in micro-batches."""
        if not keyword_inputs:
            self._backend.check_inputs(inputs)
        if any(isinstance(value, MicroBatches) for value in (*inputs, *keyword_inputs.values())):
            return given(inputs, keyword_inputs, self.input_device)
        return microbatch.split(inputs, keyword_inputs, self._chunks, self.input_device)

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
        self, rows: Sequence[int], inputs: tuple[Any, ...], keyword_inputs: dict[str, Any]
    ) -> Iterator[None]:
        """For the first mini-batch that is cut: looks for uses in which dimension 0 is not that of the rows."""
        if self.is_first and len(inputs) + len(keyword_inputs) > 1:
            for doubt in doubts_about_masks(inputs, keyword_inputs):
                warnings.warn(doubt, PipeWarning, stacklevel=7)
        with watched(modules_with_batch_second(self.named_children()), {*rows}) as doubts:
            yield
        self._cut_before = True
        for doubt in doubts:
            warnings.warn(doubt, PipeWarning, stacklevel=7)

    def _program(self, micro_batches: int, checkpointed: int, *, inside: bool) -> Program:
        """The schedule, ready for the runtime; made once for each number of micro-batches that occurs."""
        key = (micro_batches, checkpointed, inside)
        if key not in self._programs:
            plain = self._plan.schedule(micro_batches)
            program = self._checked(with_recompute(plain, checkpointed, loss_outside=not inside))
            self._programs[key] = self._backend.program(program, self._skips)
        return self._programs[key]

    def _checked(self, schedule: Schedule) -> Program:
        """The program of a schedule; a subclass may change the order."""
        return Program.of(schedule)

    def _engine_in_use(self) -> Engine:
        """The stages and workers, made at the first mini-batch and again after a copy, an unpickling or a fork."""
        with self._engine_lock:  # two threads may call for the first time at once
            return self._opened()

    def _opened(self) -> Engine:
        if self._engine is None or not self._engine.workers.alive:
            if self._backend.is_whole:
                # Again for each engine, since replacing a layer makes a new one.
                verify_skippables(self)
                refuse_shared_statistics(self.partitions)
                self._skips = self._skips_between(self.partitions)
            self._deferred = [module for module in self.modules() if isinstance(module, DeferredBatchNorm)]
            self._engine = make_engine(
                self._partitions,
                self.balance,
                self._plan.partitioning.devices,
                self._plan.placement,
                self._skips,
                peers=self._backend.peers,
                tuples=self._tuples,
                loss=self._loss.function if isinstance(self._loss.function, nn.Module) else None,
            )
            self._backend.use(self._engine.workers)
        return self._engine

    def _skips_between(self, partitions: Sequence[nn.Sequential]) -> list[Skip]:
        # The stages of a process share its device; those of threads may share a device with other workers.
        places = self._plan.partitioning.devices if self._backend.is_whole else self._plan.placement
        return [Skip(edge.key, edge.source, edge.destinations, tuple(places)) for edge in skip_edges(partitions)]


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


def _backend(mesh: Mesh | DeviceMesh | None, devices: Sequence[int | str | torch.device] | None) -> Backend:
    """Where the workers are. A further kind of workers is a file that implements `Backend`, and a line here."""
    if mesh is None:
        return LocalBackend(devices)
    from pipework.distributed.backend import DistributedBackend  # needs torch.distributed, which a build may lack

    return DistributedBackend(mesh, devices)
