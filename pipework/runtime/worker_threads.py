"""The threads that execute actions in one process: one per worker, idle between mini-batches, ended with their pipe."""

from __future__ import annotations

import contextlib
import contextvars
import os
import threading
import weakref
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pipework.runtime.device import WorkerDevice

# Seconds after which the waiting caller wakes up. The system may deliver a signal to any thread. Python handles it in
# the main thread, which a signal to another thread does not wake.
_PULSE = 0.2


class WorkerThreads:
    """A thread for each device of a pipe.

    The threads refer to their queue and their device but not to the pipe, so they end when the pipe is dropped.
    """

    def __init__(self, devices: Sequence[WorkerDevice]) -> None:
        self._process = os.getpid()
        self._cpu_workers = sum(device.stream is None for device in devices)
        self._queues: list[SimpleQueue[Any]] = [SimpleQueue() for _ in devices]
        self._threads = [
            threading.Thread(target=_serve, args=(queue, device), name=f"pipework worker {number}", daemon=True)
            for number, (queue, device) in enumerate(zip(self._queues, devices, strict=True))
        ]
        self._share = 0
        # In a forked process PyTorch makes its intra-op threads anew when a thread sets their number. Where no lock of
        # the interpreter keeps several threads from doing so at once, that ends the process.
        torch.set_num_threads(torch.get_num_threads())
        for thread in self._threads:
            # A new thread may keep the caller's variables (`sys.flags.thread_inherit_context`), and all that they hold.
            contextvars.Context().run(thread.start)
        for thread in self._threads:
            # A worker that drops its own pipe last is still destroying what the pipe had. If the interpreter ended
            # meanwhile, that could abort the process. Finalizers run in reverse order: `_end` comes before.
            weakref.finalize(thread, _wait_for, weakref.ref(thread))
        weakref.finalize(self, _end, self._queues, self._threads)

    @property
    def alive(self) -> bool:
        """False in a process that was forked after the threads were started: a fork copies no threads."""
        return self._process == os.getpid()

    def refuse_caller(self) -> None:
        """Raises a RuntimeError if jobs of the calling thread would never end."""
        if threading.current_thread() in self._threads:
            raise RuntimeError(
                "a layer of a pipe has called that pipe, or a backward of it, from inside: its workers are busy with "
                "the layer. Call the layers themselves, or another pipe of a copy of them"
            )
        if not self.alive:
            raise RuntimeError(
                "this mini-batch went forward before the process was forked, and its workers' threads stayed behind; "
                "call the pipe again in this process"
            )

    def intra_op_share(self, threads: int) -> int:
        """The intra-op threads of each worker, of those that the caller has."""
        return max(1, threads // max(1, self._cpu_workers))

    def run(self, jobs: Sequence[Callable[[], None]], interrupted: Callable[[BaseException], None]) -> None:
        """Runs each job on a worker and waits until all have ended. Jobs must not raise.

        The caller may be interrupted (Ctrl-C) between any two instructions. So progress is kept as state that can be
        read again: a message would be lost if the interruption came just after it was taken.

        Args:
            jobs: one for each worker, or for the first ones.
            interrupted: called if the caller is interrupted; it must make the jobs end soon.
        """
        threads = torch.get_num_threads()
        share = self.intra_op_share(threads)
        wake: SimpleQueue[None] = SimpleQueue()
        tasks = [_Task(job, share, wake) for job in jobs]
        interruption: BaseException | None = None
        while not all(task.ended for task in tasks):
            try:
                if interruption is not None:
                    interrupted(interruption)
                for queue, task in zip(self._queues, tasks, strict=False):
                    if not task.queued:
                        queue.put(task)
                        task.queued = True
                while not all(task.ended for task in tasks):
                    with contextlib.suppress(Empty):
                        wake.get(timeout=_PULSE)
            except BaseException as error:
                interruption = error
        if self._share != share:
            # The number of intra-op threads is set for each thread, but threads that are started later take the number
            # that a worker has set.
            torch.set_num_threads(threads)
            self._share = share
        if interruption is not None:
            interrupted(interruption)


@dataclass(slots=True, eq=False)
class _Task:
    """A job in a worker's queue, into which it may be put twice."""

    job: Callable[[], None] | None
    share: int
    wake: SimpleQueue[None]
    queued: bool = False
    ended: bool = False

    def run(self) -> None:
        """Runs the job at the first call, and does nothing at later ones."""
        job, self.job = self.job, None
        if job is None:
            return
        job()
        # The caller may drop the mini-batch and need its memory at once, so no reference may stay here.
        del job
        self.ended = True
        self.wake.put(None)


def _serve(queue: SimpleQueue[Any], device: WorkerDevice) -> None:
    device.begin_thread()
    share = 0
    with torch.autograd.set_multithreading_enabled(False):
        # A backward must run on the worker that calls it. The engine has one thread per device, for which workers would
        # wait.
        while (task := queue.get()) is not None:
            if task.share != share:
                share = task.share
                torch.get_num_threads()  # the first call on a thread resets the number, so it comes before the set
                torch.set_num_threads(share)
            task.run()
            del task


def _end(queues: list[SimpleQueue[Any]], threads: list[threading.Thread]) -> None:
    for queue in queues:
        queue.put(None)
    for thread in threads:
        if thread is not threading.current_thread() and thread.is_alive():
            thread.join()


def _wait_for(reference: weakref.ref[threading.Thread]) -> None:
    if (thread := reference()) is not None:  # at the exit
        thread.join()
