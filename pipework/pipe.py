"""The `Pipe` module: an `nn.Sequential` trained by several workers at once."""

from __future__ import annotations

import contextlib
import itertools
from copy import copy
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from torch import nn

from pipework.assignment.assignment import assign, warn_of_offload
from pipework.assignment.partition import split_layers
from pipework.backend import Backend, PipeSpec, StepCall
from pipework.doubts import Doubts
from pipework.executor import Executor
from pipework.model.batchnorm import convert_deferred_batch_norm, doubt_about_statistics
from pipework.model.layers import Layers, refuse_own_behaviour
from pipework.model.materialize import on_meta
from pipework.model.sequential import tuple_rule
from pipework.runtime.random.streams import draw_key
from pipework.runtime.random.unseen_draws import generators_given_up
from pipework.runtime.stage.execution_views import refuse_shared_statistics
from pipework.settings import Settings
from pipework.skip.layout import verify_skippables
from pipework.timeline import Recording
from pipework.timeline.recording import checked_step
from pipework.tracebacks import ShortTracebacks, warn_caller

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence, Sized

    from torch import Tensor
    from torch.distributed.device_mesh import DeviceMesh
    from torch.utils.data.distributed import DistributedSampler

    from pipework.assignment.assignment import Assignment
    from pipework.attached import AttachedModel
    from pipework.backend import ProcessGroupView
    from pipework.distributed.mesh import Mesh
    from pipework.model.marks import OwnSplit
    from pipework.planning.measuring.predict import Prediction
    from pipework.planning.plan import Plan
    from pipework.runtime.graphs.captured_steps import GraphCount
    from pipework.schedule import Schedule, ScheduleSpec
    from pipework.verify import Verification


class Pipe(Layers):
    """Trains an `nn.Sequential` as a pipeline: its layers are cut into partitions, each mini-batch into micro-batches.

    Partitions work at the same time, each on its own device and on another micro-batch. Outputs, loss and gradients are
    those of the module run micro-batch by micro-batch, to the last bit; outside, the pipe is ordinary autograd.

    Args:
        module: the layers in order. They stay the user's own objects, with the parameter names of `module`. Those on
            the meta device are given memory where they run, and initialised by their `reset_parameters()`.
        chunks: how many micro-batches a mini-batch is split into, along dimension 0 of its tensors; a batch of fewer
            rows makes as many as it has rows. More chunks make a smaller bubble (the workers' idle share,
            (p-1)/(m+p-1) for p workers and m chunks), until a micro-batch is too small to keep a device busy.
        checkpoint: which micro-batches are computed again for their backward instead of being kept: 'always',
            'except_last' or 'never'. Training mode only. Leave this out with a `Schedule` of your own that has ``R``.
        deferred_batch_norm: True replaces the batch norms in `module` by `DeferredBatchNorm`, whose running statistics
            are those of the whole mini-batch. False: batch norms stay, and take statistics of each micro-batch in turn.
            None: likewise, and a warning names them.
        balance: how many layers each partition has. None: as the layers lie on devices already, else chosen by their
            cost.
        devices: one for each worker, which holds one partition, or several if the schedule is such as
            'interleaved-1f1b'; numbers are accelerators. ["cpu", "cpu"] means two workers that run at the same time,
            each with its share of the cores. Devices without a partition stay unused. None: where the layers lie, else
            all accelerators, else the CPU.
        schedule: the order of what the workers do: the name of any schedule that trains, such as 'gpipe', '1f1b',
            'interleaved-1f1b', 'looped-bfs', 'zb-h1' or 'zb-v' (or of its class in torch.distributed.pipelining), a
            `Schedule` of your own, or a `ScheduleSpec` that makes one of any size. All but 'gpipe' and 'looped-bfs'
            need the loss inside, `pipe(x, target=y)`.
        loss_fn: from the output and the target of a micro-batch to its loss, a 0-dimensional tensor. None: if a target
            is given, the last layer takes it as its last positional argument and returns the loss. After some
            mini-batches a function that is not PyTorch's is called once more, without gradients, for two micro-batches
            together: a warning says if that is not the mean or sum of its values for each.
        loss_reduction: 'mean': the loss of the mini-batch is the mean of its micro-batches' losses, weighted by rows;
            'sum': their sum.
        loss_weight: from a micro-batch's target to its weight in the mean, in place of its rows, such as
            `lambda target: (target != -100).sum()`. None: what `cross_entropy` or `nll_loss` counts, if `loss_fn` is
            one of them, and else the rows.
        grad_scaler: gradients carry its scale inside of the pipe already, so that small ones survive in float16; use
            it outside as always.
        mesh: what `pipework.init()` returned, or a `DeviceMesh`: each worker is a process, and this one holds the
            layers of its own stages only. Then the pipe is made and called by all processes alike. Its dimension "pp"
            has the workers of one pipe, "dp" replicas of it, and any further one, such as "tp", the processes that
            compute the same layers together on the same data; `pipework.Mesh.of` takes other dimensions of replicas.
            None: the workers are threads of this process.
        plan: what `pipework.plan` returned for these layers; it decides chunks, checkpoint, balance and schedule, and
            the devices unless they are given. With a mesh all processes load the same plan, of as many workers.
        split: cuts a mini-batch that cannot be cut along the rows of its tensors: a function of the call's positional
            arguments, a dict of its keyword arguments, its target and `chunks`. It returns for each micro-batch a tuple
            of the first three. The rest is as if the call had these in `MicroBatches`. If workers are processes, those
            that read the inputs or the target call it, each with the whole call.
        debug: one or several of these, for a pipe that does something unexpected. 'check_finite': NaN or an infinity in
            an output or a gradient raises a FloatingPointError at once, with a note that says where; on an accelerator
            the host waits for every result to see it. 'one_thread': one thread executes the actions of all workers of
            this process, in the order of the schedule, where otherwise each worker has a thread. On accelerators the
            host then waits less for Python's lock, but a layer that waits for its device (`.item()`, `.nonzero()`)
            holds up all workers.
        graphs: True: training steps with a target are captured as CUDA graphs, one for each action, and replayed by one
            thread, so that the host is no limit. What graphs cannot repeat is an error. 'auto': where there are no
            graphs, or a layer cannot be captured, the pipe goes on without. 'hooks': hooks of layers may be left out of
            replays; with 'auto' as ('auto', 'hooks'). See docs/gpus.md.
        offload: 'activations': the activations of a micro-batch on a stage go to host memory after its forward, and
            come back for its backward, while the worker computes others. A number n: those of the newest n
            micro-batches of each stage stay on the device. Copies are placed as if one took as long as a forward;
            `plan` measures them. Training mode only. Leave this out with a `Schedule` of your own that has ``O`` and
            ``L``.

    Raises:
        TypeError: `module` is no `nn.Sequential`.
        ValueError: `chunks`, `checkpoint`, `balance` or `offload` has a value that cannot be used, or the processes
            disagree; the message says what is accepted, or what differs.
        IndexError: there are more partitions than devices.

    Example:
        >>> module = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
        >>> pipe = Pipe(module, chunks=4, balance=[2, 1], devices=["cpu", "cpu"])
        >>> output = pipe(torch.randn(16, 4))
        >>> output.square().mean().backward()
        >>> output.shape, pipe[0].weight.grad.shape
        (torch.Size([16, 2]), torch.Size([8, 4]))
    """

    _own_attributes: ClassVar[frozenset[str]] = Layers._own_attributes | {
        "_assignment", "_backend", "_executor",
    }  # fmt: skip
    _executor_type: ClassVar[type[Executor]] = Executor
    _warns: ClassVar[bool] = True  # of what is probably not meant; see `PipeWarning`
    _attached: AttachedModel | None = None

    def __init__(
        self,
        module: nn.Sequential,
        chunks: int = 1,
        checkpoint: str = "except_last",
        deferred_batch_norm: bool | None = None,
        *,
        balance: Sequence[int] | None = None,
        devices: Sequence[int | str | torch.device] | None = None,
        schedule: str | Schedule | ScheduleSpec = "gpipe",
        loss_fn: Callable[[Any, Any], Tensor] | None = None,
        loss_reduction: str = "mean",
        loss_weight: Callable[[Any], Any] | None = None,
        grad_scaler: torch.amp.GradScaler | None = None,
        mesh: Mesh | DeviceMesh | None = None,
        plan: Plan | None = None,
        split: OwnSplit | None = None,
        debug: str | Iterable[str] = (),
        graphs: bool | str | Iterable[str] = False,
        offload: bool | str | int = False,
    ) -> None:
        # 1. What was asked for is checked; what a plan decides is added.
        settings = Settings.of(locals())
        if settings.plan is not None:
            from pipework.assignment.from_plan import planned  # seldom needed

            settings = planned(settings, module)
        if isinstance(module, nn.Sequential):
            refuse_own_behaviour(module)
            verify_skippables(module)
        # 2. Which worker and which device has which layers.
        with ShortTracebacks():
            backend = backend_for(settings.mesh, settings.devices)
            assignment = assign(module, settings.schedule, settings.chunks, settings.balance, backend.devices)
            here = backend.own_stages(assignment)
        # Of several processes all have the same doubts, and one says so.
        warns = self._warns and backend.ranks.replica == 0 and 0 in (here or [0])
        if warns:
            _warn_of_doubts(module, assignment, settings)
        # 3. The layers go there; this process is the container of its own.
        if settings.deferred_batch_norm:
            convert_deferred_batch_norm(module, settings.chunks)
        key = draw_key() if any(map(on_meta, module)) else None
        partitions = split_layers(module, assignment.partitioning, key, here)
        refuse_shared_statistics(partitions)
        super().__init__(partitions, assignment.partitioning.devices, here, key)
        # 4. What runs them; all processes agree that they have the same pipe.
        self._backend, self._assignment = backend, assignment
        make, rule, doubts = self._executor_type, tuple_rule(module), Doubts(warns=self._warns)
        executor = self._executor = make(assignment, backend, partitions, here, settings, rule, doubts)
        own = [*self.named_parameters(), *self.named_buffers()]
        with ShortTracebacks():
            workers = executor.engine_in_use
            backend.join(PipeSpec(module, assignment, partitions, executor.skips, settings, key, own, workers))
            if settings.graph_names:
                workers()  # refuses devices without graphs
        if warns and settings.keep is not None and settings.chunks > 1:
            warn_of_offload(self.schedule())
        settings.place(self.output_device)
        self.training = module.training

    _refused_attributes = Layers._refused_attributes | frozenset(Settings.names())

    @property
    def plan(self) -> Plan | None:
        """The plan that the pipe follows; None: it has none."""
        return self._executor.settings.plan

    @property
    def graphs(self) -> GraphCount | None:
        """How many training steps were captured and replayed, and why the others ran without; None: `graphs=` is off.

        Example:
            >>> pipe = Pipe(nn.Sequential(nn.Linear(2, 2)), devices=["cpu"], graphs="auto")
            >>> pipe.graphs.replayed
            0
        """
        steps = self._executor.engine_in_use().captured_steps
        return None if steps is None else steps.count

    @property
    def chunks(self) -> int:
        """How many micro-batches a mini-batch is split into."""
        return self._executor.settings.chunks

    @property
    def checkpoint(self) -> str:
        """Which micro-batches are computed again for their backward; `save_checkpoint` has nothing to do with it.

        The mode, or "as scheduled" if the pipe's own schedule says it.
        """
        return self._executor.settings.checkpoint

    @property
    def balance(self) -> list[int]:
        """How many layers each partition has."""
        return list(self._assignment.partitioning.balance)

    @property
    def devices(self) -> list[torch.device]:
        """The device of each worker; with one partition per worker, of each partition."""
        return list(self._assignment.devices)

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
        return self._backend.ranks.replica

    @property
    def data_parallel_size(self) -> int:
        """How many replicas of the pipe there are, each of which is to be given other data."""
        return self._backend.ranks.replicas

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
        loss_scale: float | Tensor | None = None,
        outputs: Literal["last", "all"] = "last",
        **keyword_inputs: Any,
    ) -> Any:
        """Computes what the un-partitioned module would, and prepares for its backward.

        With a target the whole schedule runs, forward and backward, and the loss is returned; its `backward()` delivers
        the gradients that this call has computed.

        Args:
            inputs: go to the first layer, moved to its device. Tensors are split along their rows, everything else
                goes to every micro-batch as it is. The first tensor has its rows in dimension 0, any other in the
                dimension that has as many in the first mini-batch. `Chunk` and `NoChunk` say otherwise. `MicroBatches`
                are not split: they are the parts.
            target: what the loss compares the output with, any nested structure, moved to the last device and split
                along dimension 0, or `MicroBatches` like the inputs. None: the loss is computed outside.
            return_output: return loss and output.
            loss_scale: with a target, multiplies the loss of each micro-batch before its backward, and the loss that is
                returned: 1 / 8 for the mean over 8 mini-batches whose gradients are accumulated. A factor outside,
                `(pipe(x, target=y) / 8).backward()`, multiplies finished gradients, which differs if a backward is not
                linear, as with a hook that clamps. A positive number, or a 0-dimensional tensor; if workers are
                processes, the one of the last stage's process counts.
            outputs: if workers are processes: 'last' returns outputs in the process of the last stage, and None in all
                others; 'all' returns them everywhere.
            keyword_inputs: like `inputs`.

        Returns:
            With a target the loss of the mini-batch, 0-dimensional; with `return_output` a pair of the loss and the
            output, which has no graph. Without a target the last layer's output, on the last device: tensors are
            concatenated over the micro-batches (0-dimensional ones averaged by rows), other values collected in a list.
            If the inputs are `MicroBatches`, so are the outputs.

            If workers are processes, all of them return the same loss.

        Raises:
            TypeError: there is no tensor among the inputs, or the loss is no tensor.
            ValueError: a tensor cannot be split, tensors have different numbers of rows or arguments different numbers
                of micro-batches, a list or an object has an entry for each row, rows cannot weigh the mean, the
                schedule needs a target, the loss has dimensions, or `loss_scale` is no positive number.
        """
        if outputs not in ("last", "all"):
            raise ValueError(f"outputs is not one of 'last' or 'all': got {outputs!r}")
        if return_output and self._executor.settings.loss_fn is None and (target is not None or not self.is_last):
            raise ValueError(
                "the last layer returns the loss, so there is no output to return: give the pipe a loss_fn"
            )
        if not self._modules:
            if target is not None:
                raise ValueError("a pipe without layers has no loss: leave the target out")
            return nn.Sequential()(*inputs, **keyword_inputs)
        if self._attached is not None:
            self._attached.follow(self)
        what = "training step" if self.training and torch.is_grad_enabled() else "evaluation"
        with ShortTracebacks(), generators_given_up(), self._backend.calling(what):
            self._refuse_changed_partitions()
            self._refuse_to_run_without_data()
            # Of several processes each knows its own layers only, but all know the flag of the pipe.
            training = any(layer.training for layer in self) if self._backend.is_whole else self.training
            call = StepCall(
                training,
                torch.is_grad_enabled(),
                everywhere=outputs == "all",
                returns_output=return_output,
                recorded=self._executor.recording is not None,
                scales_loss=loss_scale is not None,
                has_target=target is not None,
            )
            result, warnings = self._executor.run(inputs, keyword_inputs, target, loss_scale, call)
        if self._attached is not None and call.training and call.grad:
            self._attached.trained_as = id(vars(self._attached.model).get("forward"))
        # Not before: a warning may be an error, and the call has succeeded, in other processes too.
        for text in warnings:
            warn_caller(text)
        return result

    @contextlib.contextmanager
    def record(self, step: int | None = None, *, memory: bool = True) -> Iterator[Recording]:
        """Records what the workers do, and when, for every mini-batch inside the context.

        Recording also counts the memory that autograd keeps, which costs a few microseconds an operator: it is meant
        for one mini-batch now and then, and with `memory=False` for exact times. If workers are processes, all of them
        record, and each gets the whole picture.

        Args:
            step: the number of the first mini-batch inside, in the caller's own counting; pictures show it, and the
                next ones follow. None: the recording counts its mini-batches from 0.
            memory: whether bytes are counted; otherwise they are 0.

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
        executor, recording = self._executor, Recording(counts=step is None, memory=memory)
        before = executor.recording
        executor.recording = recording, itertools.count(0 if step is None else checked_step(step))
        try:
            yield recording
        finally:
            executor.recording = before

    def predict(
        self,
        *inputs: Any,
        target: Any = None,
        optimizer: torch.optim.Optimizer | float | None = None,
        timeout: float = 0.5,
        progress: Callable[[str], None] | None = None,
        **keyword_inputs: Any,
    ) -> Prediction:
        """Says how long a training step will take and how much memory each stage will need, before there was one.

        A copy of each stage runs one micro-batch forward and backward, by itself; the pipe does not change. The
        schedule is then simulated with the measured times and bytes. The prediction does not know that workers may slow
        each other down.

        Args:
            inputs: of a mini-batch, as for the pipe itself, or for the model to which it is attached. All micro-batches
                are taken to be like the largest one.
            target: of the mini-batch; None: the loss is outside.
            optimizer: whose state counts, too; or how many numbers an optimizer keeps for each parameter, such as 2 for
                Adam.
            timeout: for how many seconds to measure each stage.
            progress: called with a line for each stage, such as `print`; None: lines are logged to "pipework" (INFO).
            keyword_inputs: like `inputs`.

        Raises:
            TypeError: as for the pipe itself, or what the optimizer keeps cannot be found out.
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
        if (attached := self._attached) is not None:  # is called as its model is
            attached.follow(self)
            if attached.target == "target" and target is not None:
                keyword_inputs["target"] = target
            inputs, keyword_inputs, names = attached.call_of(inputs, keyword_inputs)
            target = names.get(attached.target, target) if attached.target else target
        return self._executor.predict(
            inputs, keyword_inputs, target, optimizer=optimizer, timeout=timeout, progress=progress
        )

    def verify(self, *inputs: Any, target: Any = None, **keyword_inputs: Any) -> Verification:
        """Proves the pipe on a mini-batch of your own: runs it, and compares all that it computes with the plain model.

        Outputs, loss, the gradients of parameters and inputs, buffers, and numbers that layers keep are compared:

        * with the plain model, run micro-batch by micro-batch with the same random numbers, to the last bit. Where bits
          differ, the plain model runs again: four times its own difference is allowed, as kernels may add in any order;
        * with the plain model and the whole batch at once, relatively, without dropout (in evaluation mode, but for
          norms with running statistics). This shows whether the batch is cut along its rows and the loss weighs them
          right.

        Of a pipe with `graphs=`, replays are compared, too: of the captured step that the pipe has for such a batch,
        else of one that is captured here, which takes up to seven steps more, and the memory of a captured step. All
        other runs are without graphs.

        Of a pipe that is attached to a model, the plain model is the model's own forward. In evaluation mode, and under
        `torch.no_grad()`, there are no gradients. With the loss outside, they are those of random numbers in place of
        the loss's gradient. Nothing is changed: parameters, `.grad`, buffers, generators, flags, hooks, and what the
        pipe remembers are as before, also after an error. But hooks of yours run, and what a forward writes into
        parameters, or into objects of other kinds than lists, dicts, sets and tensors, stays.

        It takes the time of two steps of the pipe and two of the plain model, where one worker computes at a time, and
        of at most three more if something differs. The memory is that of a step of the whole batch without
        recomputation, on the devices of the layers, a copy of the buffers there, and three copies of the gradients on
        the host. So take a batch that fits, with at least two rows in each micro-batch.

        If workers are processes, all call this with the same batch. Each runs its own layers while the others wait, and
        the outputs go through the host. Gradients of parameters that several processes use, and means over a number of
        replicas that is no power of two, may be equal up to rounding only.

        Args:
            inputs: as for the pipe itself, or for the model to which it is attached.
            target: likewise; None: the loss is outside.
            keyword_inputs: likewise.

        Returns:
            What was found: true if nothing differs. `print(...)` shows a table, the first layer that differs, and the
            usual reasons.

        Raises:
            ValueError: there are no layers, processes hold shards of one layer, or were given different batches.

        Example:
            >>> module = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.1), nn.Linear(8, 2))
            >>> pipe = Pipe(module, 4, schedule="1f1b", loss_fn=nn.functional.mse_loss, devices=["cpu", "cpu"])
            >>> bool(pipe.verify(torch.randn(16, 4), target=torch.randn(16, 2)))
            True
        """
        from pipework.verify import verify  # seldom needed

        return verify(self, inputs, keyword_inputs, target)

    def __repr__(self) -> str:
        """A table of the partitions."""
        from pipework.summary import table  # seldom needed

        return table(self)

    def schedule(self, micro_batches: int | None = None) -> Schedule:
        """The order of all actions of a training mini-batch.

        Args:
            micro_batches: their number; None: `chunks`.
        """
        return self._executor.schedule(micro_batches)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """See `torch.nn.Module`."""
        self._executor.refuse_during_steps("pipe.state_dict() was called")
        return super().state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """See `torch.nn.Module`."""
        self._executor.refuse_during_steps("pipe.load_state_dict() was called")
        return super().load_state_dict(*args, **kwargs)

    def _prepared(self, layer: nn.Module) -> nn.Module:
        self._executor.layer_replaced()
        settings = self._executor.settings
        return convert_deferred_batch_norm(layer, settings.chunks) if settings.deferred_batch_norm else layer

    def __getstate__(self) -> dict[str, Any]:
        """For copies and pickles, each with an executor of its own."""
        if not self._backend.is_whole:
            raise TypeError(
                "a pipe whose workers are processes cannot be copied or pickled: copy its layers, or save it with "
                "pipework.save_checkpoint"
            )
        return {**self.__dict__, "_executor": copy(self._executor)}


def _warn_of_doubts(module: nn.Module, assignment: Assignment, settings: Settings) -> None:
    """What is probably not meant: nothing is pipelined, or each of several processes trains the whole model alone."""
    doubts, workers = [], assignment.workers
    if workers > 1 and settings.chunks == 1:
        doubts.append(
            f"chunks is 1, so {workers} workers wait for each other and nothing is pipelined: give Pipe "
            f"chunks={4 * workers} or so, the number of micro-batches that a mini-batch is split into"
        )
    if settings.deferred_batch_norm is None and settings.chunks > 1:
        doubts += filter(None, [doubt_about_statistics(module)])
    alone = settings.mesh is None and settings.devices is None and torch.distributed.is_available()
    if alone and torch.distributed.is_initialized():
        from pipework.distributed.mesh import doubt_about_no_mesh  # needs torch.distributed, which a build may lack

        doubts += filter(None, [doubt_about_no_mesh()])
    for doubt in doubts:
        warn_caller(doubt)


def backend_for(mesh: Mesh | DeviceMesh | None, devices: Sequence[int | str | torch.device] | None) -> Backend:
    """Where the workers are. A further kind of workers is a class that derives from `Backend`, and a line here."""
    if mesh is None:
        return Backend(devices)
    from pipework.distributed.backend import DistributedBackend  # needs torch.distributed, which a build may lack

    return DistributedBackend(mesh, devices)
