"""The ranks that hold one pipe together: how a call begins on all of them, and what they do for each other."""

from __future__ import annotations

import contextlib
import json
import logging
import threading
import weakref
from typing import TYPE_CHECKING, TypeVar

from torch.distributed.distributed_c10d import PrefixStore

from pipework.distributed.agreement import agree
from pipework.distributed.all_gather import AllGather
from pipework.distributed.gradients.found_inf import FoundInf
from pipework.distributed.gradients.grad_norm import norm_of_all, norms_of_stages
from pipework.distributed.health.errors import PREEMPTED
from pipework.distributed.health.monitor import HealthMonitor
from pipework.distributed.health.preemption import Preemption
from pipework.distributed.health.status import describe_action
from pipework.distributed.rendezvous import Rendezvous
from pipework.distributed.step_header import StepFacts, StepHeader, StepHeaders
from pipework.distributed.transport.channel import LostConnectionError
from pipework.distributed.transport.rank_transport import RankTransport
from pipework.runtime.failure import Failure
from pipework.schedule.stage_names import named_stages
from pipework.testing.faults import Faults
from pipework.timeline.shared_clock import intervals_as_text, intervals_from_text

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from torch import Tensor
    from torch.distributed.distributed_c10d import Store

    from pipework.distributed.mesh import Mesh
    from pipework.distributed.rendezvous import Connections, RendezvousSpec
    from pipework.runtime.peers import RunSpec
    from pipework.runtime.transport import LocalTransport, Transport
    from pipework.runtime.worker_threads import WorkerThreads
    from pipework.schedule import Action, Interval

    Result = TypeVar("Result")

_LOG = logging.getLogger("pipework")


class PeerGroup:
    """The ranks of one pipe, seen from one of them. Made by all of them at the same time.

    Args:
        mesh: the processes.
        terms: what they hold together.
        tensors: this rank's parameters and buffers by name, which get the values of the first replica's.

    Raises:
        ValueError: the ranks disagree about the terms.
        TimeoutError: some rank has not come.
    """

    def __init__(self, mesh: Mesh, terms: RendezvousSpec, tensors: Iterable[tuple[str, Tensor]]) -> None:
        self.mesh = mesh
        self.worker = mesh.worker
        self.ranks = mesh.ranks
        self.everyone = mesh.everyone
        self._placement = terms.placement
        self._first, self._last = terms.placement[0], terms.placement[-1]
        self.faults = Faults.of_environment(mesh.rank, mesh.everyone, len(terms.placement))
        # The pipes of a job are made in the same order everywhere, so each rank can count them by itself.
        number = mesh.store.add(f"pipework/pipes of {mesh.rank}", 1)
        store = PrefixStore(f"pipework/pipe {number}", mesh.store)
        position = self.everyone.index(mesh.rank)
        agree(PrefixStore("agreement", store), position, len(self.everyone), terms.contract, mesh.timeout, self._named)
        self.monitor = HealthMonitor(
            PrefixStore("monitor", store),
            position,
            len(self.everyone),
            beat=min(0.5, mesh.detect / 6),
            detect=mesh.detect,
            action_timeout=mesh.action_timeout,
            names=self._named,
            hosts_store=mesh.hosts_store,
        )
        self._connections = self._meet(store, terms, tensors)
        control, everyone = self._connections.groups["control"], self._connections.groups["everyone"]
        self._found_inf = FoundInf(control, mesh.device)
        self._headers = StepHeaders(control, self.ranks, self._first, self._last)
        self._own_exchange = AllGather(control, self.ranks)
        self._exchange = AllGather(everyone, self.everyone)
        self._turn = threading.Lock()  # held in a call
        self._caller = 0  # the thread that makes it
        self._lock = threading.Lock()
        self._failure: weakref.ref[Failure] | None = None
        self.stopping = False  # agreed on with all ranks at the end of a call that gives them results
        self.stop_was_seen = False
        self._alike: BaseException | None = None
        self._preemption = Preemption(self.monitor)
        if threading.current_thread() is threading.main_thread():
            self._preemption.install()
        # Neither the monitor nor a run's failure may keep this object: dropping a pipe ends its threads and
        # connections.
        hear = weakref.WeakMethod(self._hear_of_failure)
        self.monitor.on_failure(lambda _: None if (method := hear()) is None else method())

    @property
    def is_first(self) -> bool:
        """Whether the first stage is here."""
        return self.worker == self._first

    @property
    def is_last(self) -> bool:
        """Whether the last stage is here."""
        return self.worker == self._last

    @property
    def reduces(self) -> bool:
        """Whether gradients are averaged over replicas."""
        return self._connections.replicas is not None

    # ---- calls --------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def calling(self, what: str) -> Iterator[None]:
        """A call that all ranks make: whatever goes wrong in it on one of them, all learn.

        Args:
            what: a noun, such as "training step".

        Raises:
            PipelineError: something has gone wrong on another rank.
            RuntimeError: another thread of this process is in a call.
        """
        if not self._turn.acquire(blocking=False):
            if self._caller == threading.get_ident():
                raise RuntimeError(
                    f"a {what} of this pipe begins in the middle of another call of it, as in a signal handler: all "
                    "processes make the calls of a pipe in the same order. Leave a mark there, or call "
                    "pipe.request_stop(), and look at it between two steps"
                )
            raise RuntimeError(
                f"a {what} of this pipe begins while another thread of this process is in a call of it: all processes "
                "make the calls of a pipe in the same order, so make them from one thread"
            )
        self._caller = threading.get_ident()
        try:
            self.monitor.begin(what)
            try:
                yield
            except BaseException as error:
                if error is not self._alike:
                    self.monitor.report(error, _where(error))
                raise
            finally:
                self._alike = None
                self.monitor.end()
        finally:
            self._turn.release()

    def alike(self, error: ValueError) -> ValueError:
        """An error that all ranks of this pipe raise by themselves in this call.

        They need not tell each other, and may go on; unless there are replicas, which know nothing of it.
        """
        if self._connections.replicas is None:
            self._alike = error
        return error

    @staticmethod
    def header(*, training: bool, grad: bool, everywhere: bool, returns_output: bool, recorded: bool) -> StepHeader:
        """How this rank begins a call of the pipe."""
        return StepHeader(training, grad, everywhere, returns_output, recorded)

    def request_stop(self) -> None:
        """Asks all ranks to stop after the present training step, or the next one."""
        self._preemption.request("a request")

    def leave_if_unseen(self, what: str) -> None:
        """Ends the program if a process was asked to end, and the program does not care; on all ranks alike.

        Raises:
            SystemExit: that is so.
        """
        if self.stopping and not self.stop_was_seen and what == "training step":
            reason = self._preemption.reason  # others may not have heard yet whose it is
            who = f" ({reason})" if reason else ""
            _LOG.warning("leaving before the next training step, as a process was asked to end%s", who)
            raise SystemExit(PREEMPTED)

    def begin(
        self, workers: WorkerThreads, header: StepHeader, rows: Sequence[int] | None, key: int | None, *, inside: bool
    ) -> StepFacts:
        """Tells all ranks what the first and the last of them were given.

        Args:
            workers: of this process.
            header: how this rank begins the call.
            rows: on the first rank, of each micro-batch.
            key: on the first rank, if it has been drawn.
            inside: on the last rank, whether there is a target.
        """
        self.faults.step += header.training and header.grad
        return self.on_worker(workers, lambda: self._headers.open(header, rows, key, inside=inside))

    def all_words(self, workers: WorkerThreads, text: str) -> list[str]:
        """What each rank of the job says, in order; all of them wait here for each other."""
        words = self.on_worker(workers, lambda: self._exchange.all_words(text.encode()))
        return [word.decode() for word in words]

    def any_of_own(self, workers: WorkerThreads, happened: bool) -> bool:
        """Whether something has happened on any rank of this replica; all of them wait here for each other."""
        return any(self._own_words(workers, "yes" if happened else ""))

    def _own_words(self, workers: WorkerThreads, text: str) -> list[str]:
        """What each rank of this replica says."""
        words = self.on_worker(workers, lambda: self._own_exchange.all_words(text.encode()))
        return [word.decode() for word in words]

    def shared(self, workers: WorkerThreads, intervals: Sequence[Interval]) -> list[Interval]:
        """See `pipework.runtime.peers.PeerGroup`."""
        words = self._own_words(workers, intervals_as_text(intervals))
        return [interval for word in words for interval in intervals_from_text(word)]

    def gradient_norm(self, workers: WorkerThreads, stages: Mapping[int, Sequence[Tensor]], norm_type: float) -> Tensor:
        """The norm of all gradients of the pipe, computed on every rank from the norms of all of them.

        Args:
            workers: of this process.
            stages: the parameters of each stage here; what several stages have counts once.
            norm_type: which norm.
        """
        assert self._connections.tied is not None
        mine = norms_of_stages(stages, self._connections.tied.counted_elsewhere, norm_type)
        words = self._own_words(workers, json.dumps(mine))
        return norm_of_all([json.loads(word) for word in words], norm_type)

    def on_worker(self, workers: WorkerThreads, function: Callable[[], Result]) -> Result:
        """Runs something that waits for other ranks. In the caller's thread, no signal could interrupt it."""
        results: list[Result] = []
        failure = Failure(self.abort)
        self.during(failure)

        def job() -> None:
            progress = self.monitor.progress
            progress.action = "rendezvous the other ranks"
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

    def transport(self, local: LocalTransport, run: RunSpec) -> Transport:
        """See `pipework.runtime.peers.PeerGroup`."""
        replicas = self._connections.replicas
        if replicas is not None and run.differentiates:
            replicas.compare([each for run in run.runs.values() for each in run.aliases.parameters])
        return RankTransport(self.worker, local, run, self._connections, self)

    def starting(self, action: Action) -> None:
        """See `pipework.runtime.peers.PeerGroup`."""
        progress = self.monitor.progress
        progress.action = action
        progress.count += 1
        if self.faults:
            self.faults.strike(action.kind, action.stage, action.micro_batch)

    def during(self, failure: Failure) -> None:
        """See `pipework.runtime.peers.PeerGroup`."""
        with self._lock:
            self._failure = weakref.ref(failure)
        if self.monitor.failure is not None:
            failure.report(self.monitor.error(), None)

    def explained(self, error: BaseException) -> BaseException:
        """See `pipework.runtime.peers.PeerGroup`.

        A rank that fails tells the others before it goes; so behind a connection that was lost, there is mostly a
        better reason. A rank that was killed has told nobody: then the loss itself is the reason.
        """
        if not isinstance(error, LostConnectionError):
            return error
        here, action = self.everyone.index(self.mesh.rank), describe_action(self.monitor.progress.action)
        seen = f", seen by {self._named(here)} at {action}, in {self.monitor.current}"
        self.monitor.explain_disconnect(None if error.rank is None else self.everyone.index(error.rank), seen=seen)
        return self.monitor.error()

    def reduce(self, run: RunSpec, stage: int) -> None:
        """A stage's gradients are complete: begins to average them over the replicas."""
        if self._connections.replicas is not None:
            with self.monitor.progress.waits():  # the first time in a step for what the other replicas train
                self._connections.replicas.begin(run.runs[stage].aliases.leaves)

    def complete(self, run: RunSpec) -> None:
        """After the last action: completes the gradients."""
        connections = self._connections
        if run.differentiates:
            if connections.replicas is not None:
                connections.replicas.finish()
            assert connections.tied is not None
            connections.tied.add_up(run.runs)
        if run.scaler is not None:
            self._found_inf.share(run.scaler, [leaf for run in run.runs.values() for leaf in run.aliases.leaves])

    def asked_to_stop(self) -> bool:
        """On the last rank of every replica: whether any process was asked to end; all of them answer alike."""
        asked = self._preemption.requested
        replicas = self._connections.replicas
        return asked if replicas is None else replicas.any_of(asked)

    def abort(self) -> None:
        """Ends all transfers for good."""
        with self._lock:
            failure = None if self._failure is None else self._failure()
        error = None if failure is None else failure.error
        if isinstance(error, LostConnectionError):
            self.monitor.announce_culprit(None if error.rank is None else self.everyone.index(error.rank))
        elif error is not None:
            self.monitor.announce_culprit(self.everyone.index(self.mesh.rank))
        self._connections.abort()

    # ---- failures -----------------------------------------------------------------------------------------------

    def _meet(self, store: Store, terms: RendezvousSpec, tensors: Iterable[tuple[str, Tensor]]) -> Connections:
        """Comes together with the others; if that fails, all of them hear why."""
        self.monitor.progress.action = "making the pipe"
        self.monitor.start()
        try:
            try:
                return Rendezvous(self.mesh, store, terms, tensors, self.monitor).hold()
            except LostConnectionError as error:
                raise self.explained(error) from None
        except BaseException as error:
            self.monitor.report(error, "making the pipe")
            self.monitor.close()  # which tells it to the others before it ends
            raise

    def _named(self, position: int) -> str:
        """A rank in messages."""
        replica, worker = divmod(position, len(self.ranks))
        which = named_stages(self._placement, worker)
        return f"rank {self.everyone[position]} ({which}{f', replica {replica}' if self.mesh.replicas else ''})"

    def _hear_of_failure(self) -> None:
        self.monitor.end_process_if_stuck(self.mesh.grace)
        with self._lock:
            failure = None if self._failure is None else self._failure()
        if failure is None:
            self.abort()
        else:
            failure.report(self.monitor.error(), None)


def _where(error: BaseException) -> str | None:
    """The stage, micro-batch and action that a run has noted on its error."""
    notes = (note.removeprefix("pipework: ") for note in getattr(error, "__notes__", ()))
    return next((note for note in notes if note.startswith("stage ")), None)
