"""The peer group: the ranks that hold one pipe, the calls that they make together, and how these fail."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import time
import weakref
from typing import TYPE_CHECKING, Any, Final, TypeVar

import torch
from torch.distributed.distributed_c10d import PrefixStore

from pipework.backend import Backend
from pipework.distributed.health.errors import PREEMPTED
from pipework.distributed.health.failure_detector import DetectionTimes
from pipework.distributed.health.monitor import HealthMonitor
from pipework.distributed.health.preemption import Preemption
from pipework.distributed.health.status import describe_action
from pipework.distributed.mesh import LEFT_EARLY, PIPES
from pipework.distributed.rendezvous import Connections
from pipework.distributed.transport import groups
from pipework.runtime.failure import Failure
from pipework.schedule.placement import named_stages

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from pipework.distributed.mesh import Mesh
    from pipework.distributed.rendezvous import RendezvousSpec
    from pipework.distributed.shared_tensors import SharedTensors
    from pipework.distributed.transport.groups import Group
    from pipework.runtime.engine import Engine

    Result = TypeVar("Result")

_LOG = logging.getLogger("pipework")

_WATCHDOG: Final = 0.25
"""Seconds after which PyTorch's watchdog of a group of NCCL, which wakes every 0.1 s, knows that all transfers have
ended. Before, it takes it for an error of theirs if the other rank ends the group, and prints it."""


class PeerGroup(Backend):
    """The ranks of one pipe, as one of them sees them.

    Attributes:
        mesh: the processes.
        pipe_ranks: those of this pipe.
        everyone: those of this pipe and its replicas.
        connections: to the other ranks, once they have come together.
        monitor: of failures, likewise.
        stops: whether training is to stop. The last rank decides at the end of a step, so all ranks see it after the
            same step.
    """

    connections: Connections
    monitor: HealthMonitor

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh
        self.pipe_ranks = mesh.ranks
        super().__init__([mesh.device] * len(self.pipe_ranks))
        self.everyone = mesh.everyone
        self._failure: weakref.ref[Failure] | None = None
        self.stops = self._stop_was_seen = False
        self._common_error: BaseException | None = None

    def meet(
        self,
        spec: RendezvousSpec,
        contract: Mapping[str, Any],
        tensors: SharedTensors,
        open_workers: Callable[[], Engine],
    ) -> None:
        """All ranks compare what they were started with, and connect. They call this at the same time.

        Args:
            spec: the pipe.
            contract: what must be equal on all ranks, see `agreement`.
            tensors: this rank's parameters and buffers, which get the values of those of the first replica.
            open_workers: see `PipeSpec`. It is a method of an object that lives as long as the pipe. Only a weak
                reference to it is kept.

        Raises:
            ValueError: the ranks disagree about the pipe.
            TimeoutError: a rank has not come.
        """
        mesh = self.mesh
        self._placement = spec.placement
        self._open_workers = weakref.WeakMethod(open_workers)
        mesh.store.add(PIPES.format(mesh.rank), 1)
        # The ranks of a mesh make its pipes in the same order, so each can count them by itself. They may have made
        # others before: of another mesh, or of another slice of the same one.
        ranks = sorted(self.everyone)
        members = hashlib.sha256(str(ranks).encode()).hexdigest()[:16]
        of_mesh = mesh.store.add(f"{PIPES.format(mesh.rank)} among {members}", 1)
        store = PrefixStore(f"pipework/pipe {of_mesh} of {members}", mesh.store)
        self.monitor = HealthMonitor(
            PrefixStore("monitor", store),
            mesh.rank,
            {rank: self._named(rank) for rank in self.everyone},
            DetectionTimes(min(0.5, mesh.detect / 6), mesh.detect, action_timeout=mesh.action_timeout),
            calls=mesh.calls,
            lingers=mesh.hosts_store or mesh.uses_nccl,
        )
        weakref.finalize(self, self.monitor.close)
        self.connections = Connections(mesh, store, spec, tensors, {**contract, "mesh": mesh.layout})
        self._connect()
        if device_groups := self.connections.device_groups:
            weakref.finalize(self, _end_device_groups, device_groups, self.monitor, mesh, os.getpid())
        self._preemption = Preemption(self.monitor)
        self._preemption.install()
        # Neither the monitor nor a run's failure may keep this object: dropping a pipe ends its threads and
        # connections.
        hear = weakref.WeakMethod(self._hear_of_failure)
        self.monitor.on_failure(lambda: None if (method := hear()) is None else method())

    def _connect(self) -> None:
        """Connects with the other ranks; if that fails, the reason is reported to all."""
        self.monitor.progress.action = "making the pipe"
        self.monitor.start()
        try:
            try:
                self.connections.make(self.monitor)
            except groups.LostConnectionError as error:
                raise self.explained(error) from None
        except BaseException as error:
            # What differs each rank finds by itself. But one that comes later would wait for a rank that has given up.
            if self.connections.agreed or not isinstance(error, ValueError | TypeError):
                self.monitor.report(error, "making the pipe")
            self.monitor.close()  # which sends the report before it ends
            raise

    def _named(self, rank: int) -> str:
        """How messages name a rank, such as "rank 3 (stage 1, replica 1)"."""
        position = self.everyone.index(rank)
        place = self.mesh.place(position)
        which = [named_stages(self._placement, position % len(self.pipe_ranks))]
        only = self.mesh.replica_dimensions
        which += [f"{'replica' if only == (name,) else name} {number}" for name, number in place.items()]
        return f"rank {rank} ({', '.join(which)})"

    # ---- calls --------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def calling(self, what: str) -> Iterator[None]:
        """See `Backend`.

        Raises:
            PipelineError: another rank has failed.
            RuntimeError: another thread of this process is in a call of a pipe over this mesh.
            SystemExit: a process was asked to end, and the program never asked `stopping`; all ranks end before the
                same training step.
        """
        if self.stops and not self._stop_was_seen and what == "training step":
            reason = self._preemption.reason  # a rank may not know yet where the request came from
            who = f" ({reason})" if reason else ""
            _LOG.warning("leaving before the next training step, as a process was asked to end%s", who)
            raise SystemExit(PREEMPTED)
        running = self.mesh.calls.running
        if not running.acquire(blocking=False):
            raise RuntimeError(
                f"a {what} of this pipe begins in the middle of another call of it, or of another pipe over the same "
                "mesh, by another thread, a layer or a signal handler: all processes make the calls of all pipes in "
                "the same order, so make them from one thread, one after the other. A handler sets a flag, or calls "
                "pipe.request_stop(), which is checked between steps"
            )
        try:
            self.monitor.begin(what)
            try:
                yield
            except BaseException as error:
                if self._without_layers(error) is not error:  # on the calling thread
                    raise self.explained(error) from None
                if error is not self._common_error:
                    self.monitor.report(error, _where(error))
                raise
            finally:
                self._common_error = None
                self.monitor.end()
        finally:
            running.release()

    def common_error(self, error: ValueError) -> ValueError:
        """See `Backend`.

        With other pipes in the mesh the error is reported all the same, because they do not raise it.
        """
        if not self.connections.every_replicas and "layers" not in self.connections.groups:
            self._common_error = error
        return error

    def request_stop(self) -> None:
        """Asks all ranks to stop after the present training step, or the next one."""
        self._preemption.request("a request")

    def asked_to_stop(self) -> bool:
        """Whether any process was asked to end. The last ranks of all pipes call this, and get the same answer."""
        asked = self._preemption.requested
        for replicas in self.connections.every_replicas[:1]:
            asked = groups.any_of(replicas.group, asked)
        layers = self.connections.groups.get("layers")
        return asked if layers is None else groups.any_of(layers, asked)

    def gather(self, name: str, text: str) -> list[str]:
        """The texts of all ranks of a group, in order. Every rank of it calls this, and waits for all others.

        Args:
            name: "control", the ranks of this pipe; or "everyone", those of all its replicas.
            text: of this rank.
        """
        group = self.connections.groups[name]
        texts = [each.decode() for each in self.on_worker(lambda: groups.all_gather(group, text.encode()))]
        if name == "control":
            return texts
        of_rank = dict(zip(sorted(self.everyone), texts, strict=True))
        return [of_rank[rank] for rank in self.everyone]

    def on_worker(self, function: Callable[[], Result]) -> Result:
        """Runs a function that waits for other ranks: on a worker, because no signal could interrupt the caller."""
        open_workers = self._open_workers()
        assert open_workers is not None, "the pipe makes the call"
        results: list[Result] = []
        failure = self.new_failure()

        def job() -> None:
            progress = self.monitor.progress
            progress.action = "waiting for the other ranks"
            progress.count += 1
            try:
                with progress.waits():
                    results.append(function())
            except BaseException as error:
                failure.report(error)

        open_workers().workers.run([job], failure.report)
        if failure.happened:
            self.connections.forget()
            failure.raise_first()
        return results[0]

    # ---- failures -----------------------------------------------------------------------------------------------

    def new_failure(self) -> Failure:
        """The failure of a run, to which failures of other ranks are reported from now on."""
        failure = Failure(self.abort, self.explained)
        self._failure = weakref.ref(failure)
        if self.monitor.failure is not None:
            failure.report(self.monitor.error())
        return failure

    def explained(self, error: BaseException) -> BaseException:
        """The error to raise after a failed run: it may have its cause in another process.

        A rank that fails reports its error before it ends, so there is mostly a better reason than the lost connection.
        A rank that was killed reports nothing: then the lost connection itself is the reason.
        """
        error = self._without_layers(error)
        if not isinstance(error, groups.LostConnectionError):
            return error
        action = describe_action(self.monitor.progress.action)
        seen = f", seen by {self._named(self.mesh.rank)} at {action}, in {self.monitor.current}"
        with self.monitor.progress.waits():
            self.monitor.explain_disconnect(error.rank, seen=seen, cause=error.__cause__)
        return self.monitor.error()

    def abort(self) -> None:
        """Ends all transfers for good."""
        failure = None if self._failure is None else self._failure()
        if failure is not None and failure.error is not None:
            error = self._without_layers(failure.error)
            rank = error.rank if isinstance(error, groups.LostConnectionError) else self.mesh.rank
            self.monitor.announce_culprit(rank)
        with self.monitor.progress.waits():  # others know soon, and this rank is not stuck
            self.connections.abort()

    def _hear_of_failure(self) -> None:
        breaks = weakref.WeakMethod(self.mesh.break_layer_groups)
        self.monitor.end_process_if_stuck(self.mesh.grace, lambda: None if (method := breaks()) is None else method())
        failure = None if self._failure is None else self._failure()
        if failure is None:
            self.abort()
        else:
            failure.report(self.monitor.error())

    def _without_layers(self, error: BaseException) -> BaseException:
        """The error itself; if a layer has seen that another rank left a collective, a lost connection."""
        broken = len(self.mesh.same_layers) > 1 and groups.is_broken_collective(error)
        return groups.LostConnectionError(None) if broken else error


def _end_device_groups(device_groups: Sequence[Group], monitor: HealthMonitor, mesh: Mesh, process: int) -> None:
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
        for group in device_groups:
            group.abort()


def _where(error: BaseException) -> str | None:
    """The stage, micro-batch and action that a run has noted on its error."""
    notes = (note.removeprefix("pipework: ") for note in getattr(error, "__notes__", ()))
    return next((note for note in notes if note.startswith("stage ")), None)
