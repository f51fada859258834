"""Backends: where the workers of a pipe are. `Pipe` knows this class; another kind of workers derives from it."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import nn

from pipework.runtime.transport import LocalTransport

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence, Set
    from contextlib import AbstractContextManager

    import torch
    from torch import Tensor

    from pipework.assignment.assignment import Assignment
    from pipework.autograd.factor import Factor
    from pipework.model.mini_batch import MiniBatch
    from pipework.runtime.engine import Engine
    from pipework.runtime.program import Program
    from pipework.runtime.random.streams import Key
    from pipework.runtime.run_spec import RunSpec
    from pipework.runtime.skips.skip import Skip
    from pipework.runtime.transport import Transport
    from pipework.schedule import Interval
    from pipework.settings import Settings


@dataclass(frozen=True)
class PipeSpec:
    """A pipe as its backend must know it before the first call.

    Attributes:
        module: the layers, already cut into partitions.
        assignment: stages, workers and schedule.
        partitions: the layers of all stages.
        skips: the skip connections between them.
        settings: what the user asked for.
        key: of the random values of layers on the meta device; None: there are none.
        tensors: the parameters and buffers of this process's stages, by name.
        open_workers: the pipe's engine, whose workers are started if they do not run.
    """

    module: nn.Sequential
    assignment: Assignment
    partitions: Sequence[nn.Sequential]
    skips: Sequence[Skip]
    settings: Settings
    key: int | None
    tensors: Iterable[tuple[str, Tensor]]
    open_workers: Callable[[], Engine]


class StepCall(NamedTuple):
    """A call of the pipe: as one process makes it, or, from `Backend.begin`, what all processes know of it.

    Attributes:
        training: whether layers are in training mode.
        grad: whether gradients are wanted.
        everywhere: whether every process gets the outputs.
        returns_output: whether the output is returned beside the loss.
        recorded: whether the workers' actions are recorded.
        scales_loss: whether there is a `loss_scale`. The last rank's counts.
        has_target: whether there is a target, so that the loss is computed inside of the pipe. The last rank's counts.
        gradients: which of the inputs require a gradient, and how they are cut, see `MiniBatch`; 0: none
            does. The first rank's counts.
        rows: of the mini-batch; 0 in a process that does not read the inputs.
        micro_batches: how many the mini-batch is split into; 0 likewise.
        key: names the random numbers; None: it has not been drawn.
        target_is_unread: whether the process that reads the inputs was given a target, and the one that reads the
            target was not.
        given: for micro-batches that the caller has made, the rows of each, -1 if it has none; processes that have
            neither inputs nor targets may know -1 only. None: the pipe splits the mini-batch.
        form: a number for the form of the inputs, see `CapturedSteps`; 0: it is of no use. The first rank's counts.
        layers: a number for the layers of each worker's process, see `CapturedSteps`; None: nothing is captured.
    """

    training: bool
    grad: bool
    everywhere: bool
    returns_output: bool
    recorded: bool
    scales_loss: bool = False
    has_target: bool = False
    gradients: int = 0
    rows: int = 0
    micro_batches: int = 0
    key: int | None = None
    target_is_unread: bool = False
    given: Sequence[int] | None = None
    form: int = 0
    layers: Sequence[int] | None = None

    def reading(self, batch: MiniBatch) -> StepCall:
        """The call in the process that reads the inputs.

        Args:
            batch: the mini-batch.
        """
        given = None if batch.is_cut else batch.rows
        return self._replace(rows=sum(batch.rows), micro_batches=len(batch.rows), given=given)


@dataclass(frozen=True)
class ProcessGroupView:
    """The processes of a pipe and its replicas, as one of them sees them; for checkpoints. By default it is alone.

    Attributes:
        rank: the number of this process, replica by replica.
        everyone: the rank of each process in the job, for messages.
        replica: the replica that this process belongs to.
        replicas: how many replicas there are.
        shard: the number of this process among those that hold the same layers, or a part of them. Of each of these
            groups the first writes what is whole.
        place: of this process in the dimensions of the mesh over which these are spread, by name.
        local_names: of the parameters that each process has values of its own of.
        all_gather_text: the texts of all processes, in order. Every process calls it, and waits there for all others.
    """

    rank: int = 0
    everyone: Sequence[int] = (0,)
    replica: int = 0
    replicas: int = 1
    shard: int = 0
    place: Mapping[str, int] = field(default_factory=dict)
    local_names: frozenset[str] = frozenset()
    all_gather_text: Callable[[str], list[str]] = lambda text: [text]

    @property
    def workers(self) -> int:
        """How many processes hold each replica."""
        return len(self.everyone) // self.replicas

    @property
    def worker(self) -> int:
        """The number of this process in its replica."""
        return self.rank % self.workers


class Backend:
    """Where the workers of a pipe are, and what the processes that hold it do together.

    Here the workers are threads of this process, which knows everything and asks nobody. Another kind of workers is a
    class that derives from this one, such as `pipework.distributed.backend.DistributedBackend`.

    Args:
        devices: one for each worker, as `Pipe(devices=)` takes them; None: to be chosen.

    Attributes:
        devices: see above.
        is_whole: whether this process has all stages, so that no worker waits for another process.
        is_first: whether this process has the first stage, and reads the inputs.
        is_last: whether this process has the last stage, and reads the targets.
        tied_stages: for each parameter that stages of several processes use, these stages.
        tied_ids: the ids of these parameters.

    Example:
        >>> Backend(["cpu", "cpu"]).is_whole
        True
    """

    is_whole = is_first = is_last = True
    tied_stages: Sequence[tuple[int, ...]] = ()
    tied_ids: Set[int] = frozenset()

    def __init__(self, devices: Sequence[int | str | torch.device] | None = None) -> None:
        self.devices = devices
        self._stopping = False

    @property
    def ranks(self) -> ProcessGroupView:
        """All processes."""
        return ProcessGroupView()

    @property
    def stopping(self) -> bool:
        """Whether training is to stop."""
        return self._stopping

    def request_stop(self) -> None:
        """Asks for `stopping`, in all processes."""
        self._stopping = True

    # ---- making a pipe ----------------------------------------------------------------------------------------------

    def own_stages(self, assignment: Assignment) -> list[int]:
        """The stages of this process's workers. Raises a ValueError if a process would have none."""
        return list(range(len(assignment.placement)))

    def join(self, spec: PipeSpec) -> None:
        """Connects this process with the others that hold the pipe.

        Raises:
            ValueError: the processes disagree about the pipe.
            TimeoutError: a process has not come.
        """

    def program(self, program: Program, skips: Sequence[Skip]) -> Program:
        """The program with the transfers that these workers need; threads hand values on as they are made."""
        return program

    # ---- a call -----------------------------------------------------------------------------------------------------

    def rank_of(self, worker: int) -> int | None:
        """The process of a worker; None: it is this one."""
        return None

    def calling(self, what: str) -> AbstractContextManager[None]:
        """Entered around a call that all processes make: an error in one of them becomes an error in all.

        Args:
            what: the name of the call, such as "backward".

        Raises:
            SystemExit: training is to stop, and the program did not ask `stopping`.
        """
        return contextlib.nullcontext()

    def begin(self, call: StepCall, batch: MiniBatch | None, inputs: Any, target: Any) -> StepCall:
        """What all processes know of a call; here the key is drawn later, when the call has been checked.

        Args:
            call: as this process makes it.
            batch: the mini-batch; None: another process reads the inputs.
            inputs: that this process was given, positional and keyword ones.
            target: that this process was given.

        Raises:
            ValueError: the processes make different calls, or were given different data.
        """
        assert batch is not None
        return call.reading(batch)

    def expect_backward(self) -> Callable[[Factor], None] | None:
        """This call returns a loss whose gradients layers of this process need.

        Returns:
            What is to be called when its `backward()` has come, with the factor that the gradients got; None: nothing.
        """
        return None

    def common_error(self, error: ValueError) -> ValueError:
        """Marks an error that each process finds by itself in this call: then none reports it to the others."""
        return error

    def share_key(self, call: StepCall, key: Key) -> None:
        """After a call: if any process has drawn the key, all draw it, so that their generators stay the same."""

    def clip_grad_norm_(
        self, stages: Mapping[int, nn.Sequential], max_norm: float, norm_type: float, error_if_nonfinite: bool
    ) -> Tensor:
        """See `Pipe.clip_grad_norm_`."""
        parameters = nn.ModuleList(stages.values()).parameters()
        return nn.utils.clip_grad_norm_(parameters, max_norm, norm_type, error_if_nonfinite)

    # ---- a run of the workers ---------------------------------------------------------------------------------------

    def transport(self, spec: RunSpec) -> Transport:
        """Connects the workers for one run, and makes its `Failure`, which other processes report to."""
        return LocalTransport(spec.placement, spec.engine.links, one_thread=spec.one_thread)

    def all_intervals(self, intervals: Sequence[Interval]) -> list[Interval]:
        """The recorded actions of all workers, by this process's clock, from those of this process's workers."""
        return list(intervals)
