"""The peer group: the ranks that hold one pipe, and the calls that they make together."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import threading
import time
import weakref
from typing import TYPE_CHECKING, Final, TypeVar

import torch
from torch.distributed.distributed_c10d import PrefixStore

from pipework.distributed.agreement import agree
from pipework.distributed.all_gather import all_gather
from pipework.distributed.delivered_losses import Delivered
from pipework.distributed.faults import Faults
from pipework.distributed.generator_states import GeneratorStates
from pipework.distributed.gradients.averaging import Averaging
from pipework.distributed.gradients.found_inf import FoundInf
from pipework.distributed.gradients.grad_norm import norm_of_all, norms_of_stages
from pipework.distributed.health.errors import PREEMPTED, PipelineError
from pipework.distributed.health.monitor import HealthMonitor
from pipework.distributed.health.preemption import Preemption
from pipework.distributed.health.status import describe_action
from pipework.distributed.layer_collectives import break_layer_groups, is_broken_collective, refuse_broken_groups
from pipework.distributed.mesh import LEFT_EARLY, PIPES
from pipework.distributed.rendezvous import Rendezvous
from pipework.distributed.shared_tensors import refuse_other_shards
from pipework.distributed.step_header import StepHeaders
from pipework.distributed.transport.channel import LostConnectionError
from pipework.distributed.transport.rank_transport import RankTransport
from pipework.runtime.failure import Failure
from pipework.runtime.random.streams import draw_key
from pipework.schedule.placement import named_stages
from pipework.timeline.shared_clock import intervals_as_text, intervals_from_text
from pipework.values.dtensor import is_dtensor

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from torch import Tensor
    from torch.distributed.distributed_c10d import Store

    from pipework.autograd.factor import Factor
    from pipework.backend import StepData, StepFacts, StepHeader
    from pipework.distributed.mesh import Mesh
    from pipework.distributed.rendezvous import Connections, RendezvousSpec
    from pipework.distributed.shared_tensors import SharedTensors
    from pipework.distributed.transport.channel import Group
    from pipework.model.mini_batch import MiniBatch
    from pipework.runtime.peers import RunSpec
    from pipework.runtime.transport import Transport
    from pipework.runtime.worker_threads import WorkerThreads
    from pipework.schedule import Action, Interval

    Result = TypeVar("Result")

_LOG = logging.getLogger("pipework")

_WATCHDOG: Final = 0.25
"""Seconds after which PyTorch's watchdog of a group of NCCL, which wakes every 0.1 s, knows that all transfers have
ended. Before, it takes it for an error of theirs if the other rank ends the group, and prints it."""


class PeerGroup:
    """The ranks of one pipe, as one of them sees them. All ranks make it at the same time.

    Args:
        mesh: the processes.
        spec: the pipe.
        tensors: this rank's parameters and buffers, which get the values of those of the first replica.
        open_workers: see `PipeSpec`; a method of an object that lives as long as the pipe, and is not kept.

    Raises:
        ValueError: the ranks disagree about the pipe.
        TimeoutError: a rank has not come.
    """

    are_others = True

    def __init__(
        self,
        mesh: Mesh,
        spec: RendezvousSpec,
        tensors: SharedTensors,
        open_workers: Callable[[], object],
    ) -> None:
        self.mesh = mesh
        self.worker = mesh.worker
        self.ranks = mesh.ranks
        self.everyone = mesh.everyone
        self._placement = spec.placement
        self.faults = Faults.of_environment(mesh.rank, mesh.everyone, len(spec.placement))
        # The ranks of a mesh make its pipes in the same order, so each can count them by itself. They may have made
        # others before: of another mesh, or of another slice of the same one.
        number = mesh.store.add(PIPES.format(mesh.rank), 1)
        members = hashlib.sha256(str(sorted(self.everyone)).encode()).hexdigest()[:16]
        of_mesh = mesh.store.add(f"{PIPES.format(mesh.rank)} among {members}", 1)
        store = PrefixStore(f"pipework/pipe {of_mesh} of {members}", mesh.store)
        position = self.everyone.index(mesh.rank)
        self._agree(PrefixStore("agreement", store), spec)
        self.monitor = HealthMonitor(
            PrefixStore("monitor", store),
            position,
            len(self.everyone),
            beat=min(0.5, mesh.detect / 6),
            detect=mesh.detect,
            action_timeout=mesh.action_timeout,
            names=self._named,
            numbers=self.everyone,
            calls=mesh.calls.of_pipe(number),
            lingers=mesh.hosts_store or mesh.uses_nccl,
        )
        self._generator = GeneratorStates()
        self._connections = self._rendezvous(store, spec, tensors)
        if groups := self._connections.device_groups:
            weakref.finalize(self, _end_device_groups, groups, self.monitor, mesh, os.getpid())
        control = self._connections.groups["control"]
        self._found_inf = FoundInf(self._connections.groups["everyone"], mesh.device)
        self._tensors = tensors
        self._has_groups = len(mesh.layer_ranks) > 1 or tensors.are_collective
        self._headers = StepHeaders(
            control,
            self.ranks,
            spec.placement[0],
            spec.placement[-1],
            self._connections.layers,
            tensors.digest_of_trained,
        )
        self._open_workers = weakref.WeakMethod(open_workers)
        self._workers: weakref.ref[WorkerThreads] | None = None  # the pipe replaces them with its layers
        self._averaging = Averaging(
            self._connections.every_replicas,
            tensors,
            self.monitor.progress.waits,
            gathers_in_order=spec.contract["whole_stages"] is not None,
        )
        self._uncompared: int | None = None  # the micro-batches of this call, until they are compared with others'
        self._in_call = threading.Lock()  # held during a call
        self._caller = 0  # the thread that makes the call
        self._lock = threading.Lock()
        self._failure: weakref.ref[Failure] | None = None
        self.stopping = False  # the last rank decides at the end of a step, so all ranks see it after the same step
        self.stop_was_seen = False
        self._common_error: BaseException | None = None
        self._preemption = Preemption(self.monitor)
        if threading.current_thread() is threading.main_thread():
            self._preemption.install()
        # Neither the monitor nor a run's failure may keep this object: dropping a pipe ends its threads and
        # connections.
        hear = weakref.WeakMethod(self._hear_of_failure)
        self.monitor.on_failure(lambda _: None if (method := hear()) is None else method())

    @property
    def reduces(self) -> bool:
        """Whether gradients are averaged over replicas."""
        return self._connections.replicas is not None

    @property
    def workers(self) -> WorkerThreads | None:
        """The workers that calls run on; None: there are none now."""
        return None if self._workers is None else self._workers()

    def use(self, workers: WorkerThreads) -> None:
        """See `pipework.backend.Backend`."""
        self._workers = weakref.ref(workers)

    # ---- calls --------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def calling(self, what: str) -> Iterator[None]:
        """Entered around a call that all ranks make: an error on one rank is reported to all.

        Args:
            what: the name of the call, such as "training step".

        Raises:
            PipelineError: another rank has failed.
            RuntimeError: another thread of this process is in a call of this pipe, or of one whose layers have the same
                groups.
        """
        if not self._in_call.acquire(blocking=False):
            if self._caller == threading.get_ident():
                raise RuntimeError(
                    f"a {what} of this pipe begins in the middle of another call of it, as in a signal handler: all "
                    "processes make the calls of a pipe in the same order. Set a flag there, or call "
                    "pipe.request_stop(), and check it between two steps"
                )
            raise RuntimeError(
                f"a {what} of this pipe begins while another thread of this process is in a call of it: all processes "
                "make the calls of a pipe in the same order, so make them from one thread"
            )
        self._caller = threading.get_ident()
        generator = self._generator
        generator.enter()
        try:
            self.monitor.begin(what)
            try:
                with self.mesh.calls.in_groups(what) if self._has_groups else contextlib.nullcontext():
                    yield
            except BaseException as error:
                if self._is_of_layers(error):  # on the calling thread
                    raise self.explained(error) from None
                if error is not self._common_error:
                    self.monitor.report(error, _where(error), call=generator.call, counts=generator.counts)
                raise
            finally:
                self._common_error = None
                self.monitor.end()
        except BaseException as error:
            if self.monitor.broken:
                generator.align(self.monitor.failure if isinstance(error, PipelineError) else None)
            raise
        finally:
            generator.leave()
            self._in_call.release()

    def common_error(self, error: ValueError) -> ValueError:
        """Marks an error that every rank of this pipe raises by itself in this call.

        It is not reported to the other ranks, and the pipe stays usable. With other pipes in the mesh it is reported
        all the same, because they do not raise it.
        """
        if self._connections.replicas is None and self._connections.layers is None:
            self._common_error = error
        return error

    def request_stop(self) -> None:
        """Asks all ranks to stop after the present training step, or the next one."""
        self._preemption.request("a request")

    def leave_if_unseen(self, what: str) -> None:
        """Ends the program before a training step if a process was asked to end and the program never asked `stopping`.

        All ranks do so before the same step.

        Raises:
            SystemExit: training is to stop.
        """
        if self.stopping and not self.stop_was_seen and what == "training step":
            reason = self._preemption.reason  # a rank may not know yet where the request came from
            who = f" ({reason})" if reason else ""
            _LOG.warning("leaving before the next training step, as a process was asked to end%s", who)
            raise SystemExit(PREEMPTED)

    def begin(self, header: StepHeader, batch: MiniBatch | None, data: StepData) -> StepFacts:
        """Begins a call of the pipe on all ranks.

        Args:
            header: how this rank makes the call.
            batch: on the first rank, the mini-batch.
            data: what this rank was given.
        """
        self.faults.step += header.training and header.grad
        key = draw_key() if header.training else None
        self._generator.has_drawn = header.training
        mine = self._headers.own(header, data)
        facts = self._on_worker(lambda: self._headers.exchange(header, batch, key, mine))
        self._generator.counts = header.training
        return facts

    def expect_backward(self) -> Callable[[Factor], None]:
        """See `pipework.backend.Backend`."""
        return self._headers.losses.expect()

    def all_gather_text(self, text: str, *, compares_losses: bool = False) -> list[str]:
        """The texts of all ranks of the job, in order. Every rank calls this, and waits for all others.

        Args:
            text: of this rank.
            compares_losses: see `_gather`; alike on all ranks.
        """
        return self._gather("everyone", self.everyone, text, compares_losses=compares_losses)

    def any_of_replica(self, happened: bool) -> bool:
        """Whether something has happened on any rank of this replica. Every rank of it calls this, and waits."""
        happened = any(self._gather("control", self.ranks, "yes" if happened else ""))
        self._generator.counts = self._generator.has_drawn = True
        return happened

    def all_intervals(self, intervals: Sequence[Interval]) -> list[Interval]:
        """See `pipework.runtime.peers.Peers`."""
        texts = self._gather("control", self.ranks, intervals_as_text(intervals))
        return [interval for text in texts for interval in intervals_from_text(text)]

    def gradient_norm(self, stages: Mapping[int, Sequence[Tensor]], norm_type: float) -> Tensor:
        """The norm of all gradients of the pipe, computed on every rank from the norms of all ranks.

        Args:
            stages: the parameters of each stage of this rank; a parameter of several stages counts once.
            norm_type: the order of the norm.

        Raises:
            ValueError: other ranks of the pipe brought other losses backward, or some that have the same layers have
                no gradient where others have one.
        """
        assert self._connections.tied is not None
        elsewhere = self._connections.tied.counted_elsewhere
        local, layers = self._tensors.local, self._connections.layers
        if layers is not None:  # which take the norm of a DTensor together
            every = [each for part in stages.values() for each in part if id(each) not in local or is_dtensor(each)]
            flags = torch.tensor([each.grad is not None for each in every], dtype=torch.int64)
            self._tensors.refuse_some_missing(every, *self._on_worker(lambda: layers.extremes(flags)))
        mine = norms_of_stages(stages, {*elsewhere, *local}, norm_type)
        gathered = self._gather("control", self.ranks, json.dumps(mine), compares_losses=True)
        norms = [json.loads(text) for text in gathered]
        if self._tensors.any_are_local:
            own = {stage: [each for each in parameters if id(each) in local] for stage, parameters in stages.items()}
            found = norms_of_stages(own, elsewhere, norm_type, lambda each: local[id(each)][0] == self.mesh.rank)
            norms += map(json.loads, self._gather("everyone", self.everyone, json.dumps(found)))
        return norm_of_all(norms, norm_type)

    def _gather(self, name: str, ranks: Sequence[int], text: str, *, compares_losses: bool = False) -> list[str]:
        """The texts of all ranks of a group.

        With `compares_losses` a ValueError is raised if another rank of this pipe brought other losses backward: what
        follows would be the last of its training, such as a checkpoint, without a further call that notices it.
        """
        group = self._connections.groups[name]
        if compares_losses:
            mine = self._headers.losses.told(waits=True)
            text = f"{json.dumps(mine)}\n{text}"
        texts = [each.decode() for each in self._on_worker(lambda: all_gather(group, ranks, text.encode()))]
        if not compares_losses:
            return texts
        for rank, (theirs, _, _) in zip(ranks, map(_cut, texts), strict=True):
            if rank in self.ranks:
                self._headers.check_delivered(mine, Delivered(*json.loads(theirs)), self.ranks.index(rank))
        return [rest for _, _, rest in map(_cut, texts)]

    def _on_worker(self, function: Callable[[], Result]) -> Result:
        """Runs a function that waits for other ranks: on a worker, because no signal could interrupt the caller."""
        workers = self.workers
        if workers is None:
            open_workers = self._open_workers()
            assert open_workers is not None, "the pipe makes the call"
            open_workers()
            workers = self.workers
        assert workers is not None
        results: list[Result] = []
        failure = Failure(self.abort)
        self.during(failure)

        def job() -> None:
            progress = self.monitor.progress
            progress.action = "waiting for the other ranks"
            progress.count += 1
            try:
                with progress.waits():
                    results.append(function())
            except BaseException as error:
                failure.report(error, None)

        workers.run([job], lambda error: failure.report(error, None))
        if failure.happened:
            self._connections.forget()
            failure.explain(self.explained)
            failure.raise_first()
        return results[0]

    # ---- what a run asks for ------------------------------------------------------------------------------------

    def transport(self, spec: RunSpec) -> Transport:
        """See `pipework.runtime.peers.Peers`."""
        for run in spec.runs.values():
            if run.sharded is not None:
                refuse_other_shards(run.sharded.parameters, self.mesh)
        if spec.differentiates:
            self._averaging.compare(spec, self._headers.losses.marks)
        self._uncompared = spec.micro_batches if self._averaging.needs_equal_counts(spec) else None
        return RankTransport(self.worker, spec, self._connections, self)

    def starting(self, action: Action) -> None:
        """See `pipework.runtime.peers.Peers`."""
        progress = self.monitor.progress
        progress.action = action
        progress.count += 1
        if self._uncompared is not None:
            count, self._uncompared = self._uncompared, None
            self._averaging.refuse_other_counts(count)
        if self.faults:
            self.faults.strike(action.kind, action.stage, action.micro_batch)

    def during(self, failure: Failure) -> None:
        """See `pipework.runtime.peers.Peers`."""
        with self._lock:
            self._failure = weakref.ref(failure)
        if self.monitor.failure is not None:
            failure.report(self.monitor.error(), None)

    def explained(self, error: BaseException) -> BaseException:
        """See `pipework.runtime.peers.Peers`.

        A rank that fails reports its error before it ends, so there is mostly a better reason than the lost connection.
        A rank that was killed reports nothing: then the lost connection itself is the reason.
        """
        if self._is_of_layers(error):
            error = LostConnectionError(None)
        if not isinstance(error, LostConnectionError):
            return error
        here, action = self.everyone.index(self.mesh.rank), describe_action(self.monitor.progress.action)
        seen = f", seen by {self._named(here)} at {action}, in {self.monitor.current}"
        with self.monitor.progress.waits():
            position = None if error.rank is None else self.everyone.index(error.rank)
            self.monitor.explain_disconnect(position, seen=seen, cause=error.__cause__)
        return self.monitor.error()

    def reduce(self, spec: RunSpec, stage: int) -> None:
        """REDUCE_GRAD: begins to average the gradients of a stage, which are complete, over the replicas."""
        self._averaging.begin(spec, stage)

    def complete(self, spec: RunSpec) -> None:
        """After the last action: completes the gradients."""
        self._averaging.finish(spec)
        if spec.differentiates:
            assert self._connections.tied is not None
            self._connections.tied.add_up(spec.runs)
        if spec.scaler is not None:
            every = [run.aliases for run in spec.runs.values()]
            leaves = [leaf for aliases in every for leaf in aliases.leaves]
            gradients = [gradient for aliases in every for gradient in aliases.gradients()]
            self._found_inf.share(spec.scaler, leaves, gradients)

    def asked_to_stop(self) -> bool:
        """Whether any process was asked to end. The last ranks of all pipes call this, and get the same answer."""
        asked = self._preemption.requested
        replicas, layers = self._connections.replicas, self._connections.layers
        asked = asked if replicas is None else replicas.any_of(asked)
        return asked if layers is None else layers.any_of(asked)

    def abort(self) -> None:
        """Ends all transfers for good."""
        with self._lock:
            failure = None if self._failure is None else self._failure()
        error = None if failure is None else failure.error
        if error is not None and self._is_of_layers(error):
            self.monitor.announce_culprit(None)
        elif isinstance(error, LostConnectionError):
            self.monitor.announce_culprit(None if error.rank is None else self.everyone.index(error.rank))
        elif error is not None:
            self.monitor.announce_culprit(self.everyone.index(self.mesh.rank))
        with self.monitor.progress.waits():  # others know soon, and this rank is not stuck
            self._connections.abort()

    # ---- failures -----------------------------------------------------------------------------------------------

    def _agree(self, store: Store, spec: RendezvousSpec) -> None:
        """Raises a ValueError if ranks disagree about the pipe, or about the order of ranks that the mesh gives."""
        ranks = sorted(self.everyone)
        contract = {**spec.contract, "mesh": self.mesh.layout}

        def named(number: int) -> str:
            return self._named(self.everyone.index(ranks[number]))

        agree(store, ranks.index(self.mesh.rank), len(ranks), contract, self.mesh.timeout, named, ranks)

    def _rendezvous(self, store: Store, spec: RendezvousSpec, tensors: SharedTensors) -> Connections:
        """The rendezvous; if it fails, the reason is reported to all ranks."""
        self.monitor.progress.action = "making the pipe"
        self.monitor.start()
        try:
            try:
                refuse_broken_groups(self.mesh)
                return Rendezvous(self.mesh, store, spec, tensors, self.monitor).run()
            except LostConnectionError as error:
                raise self.explained(error) from None
        except BaseException as error:
            if self.monitor.failure is not None:
                self._generator.align(self.monitor.failure)
            self.monitor.report(error, "making the pipe")
            self.monitor.close()  # which sends the report before it ends
            raise

    def _named(self, position: int) -> str:
        """A rank in messages."""
        place = self.mesh.place(position)
        which = [named_stages(self._placement, position % len(self.ranks))]
        only = self.mesh.replica_dimensions
        which += [f"{'replica' if only == (name,) else name} {number}" for name, number in place.items()]
        return f"rank {self.everyone[position]} ({', '.join(which)})"

    def _hear_of_failure(self) -> None:
        breaks = weakref.WeakMethod(self.break_layer_groups)
        self.monitor.end_process_if_stuck(self.mesh.grace, lambda: None if (method := breaks()) is None else method())
        with self._lock:
            failure = None if self._failure is None else self._failure()
        if failure is None:
            self.abort()
        else:
            failure.report(self.monitor.error(), None)

    def break_layer_groups(self) -> None:
        """After a failure: ends what is under way in the groups of layers, for good."""
        break_layer_groups(self.mesh)

    def _is_of_layers(self, error: BaseException) -> bool:
        """Whether a layer of this rank has seen that another rank left a collective."""
        return len(self.mesh.same_layers) > 1 and is_broken_collective(error)


def _end_device_groups(groups: Sequence[Group], monitor: HealthMonitor, mesh: Mesh, process: int) -> None:
    """Ends the groups of NCCL with their pipe, or at the end of the program, when all has arrived that was sent.

    They are aborted, since a shutdown waits for other ranks, which may end later, or never.
    """
    if os.getpid() != process:  # a forked child
        return
    if not monitor.broken:
        with contextlib.suppress(RuntimeError):  # of the device, which was raised before
            torch.accelerator.synchronize(mesh.device)
            time.sleep(_WATCHDOG)
    if not monitor.close():
        vars(mesh.device_mesh)[LEFT_EARLY] = True
    with contextlib.suppress(RuntimeError):
        for group in groups:
            group.abort()


def _cut(text: str) -> tuple[str, str, str]:
    return text.partition("\n")


def _where(error: BaseException) -> str | None:
    """The stage, micro-batch and action that a run has noted on its error."""
    notes = (note.removeprefix("pipework: ") for note in getattr(error, "__notes__", ()))
    return next((note for note in notes if note.startswith("stage ")), None)
