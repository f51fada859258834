"""The threads that execute actions in one process: one per worker, idle between mini-batches, gone with their pipe."""

from __future__ import annotations

import os
import threading
import weakref
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pipework.runtime.device import WorkerDevice


class Workers:
    """A thread for each device of a pipe.

    The threads know their queue and their device, never the pipe, so that dropping the pipe ends them.

    Args:
        devices: one for each worker.
    """

    def __init__(self, devices: Sequence[WorkerDevice]) -> None:
        self._process = os.getpid()
        self._cpu_workers = sum(device.stream is None for device in devices)
        self._queues: list[SimpleQueue[Any]] = [SimpleQueue() for _ in devices]
        self._threads = [
            threading.Thread(target=_serve, args=(queue, device), name=f"pipework worker {number}", daemon=True)
            for number, (queue, device) in enumerate(zip(self._queues, devices, strict=True))
        ]
        self._intra_op_threads = 0
        for thread in self._threads:
            thread.start()
        weakref.finalize(self, _end, self._queues, self._threads)

    @property
    def alive(self) -> bool:
        """False in a process that was forked off after the threads had been started: threads are not copied."""
        return self._process == os.getpid()

    def run(self, jobs: Sequence[Callable[[], None]], interrupted: Callable[[BaseException], None]) -> None:
        """Runs one job on each worker and waits until all have ended. Jobs must not raise.

        Args:
            jobs: one for each worker.
            interrupted: called if the waiting itself is interrupted (Ctrl-C); it must make the jobs end soon.
        """
        self._share_cores()
        done: SimpleQueue[None] = SimpleQueue()
        for queue, job in zip(self._queues, jobs, strict=True):
            queue.put((job, done))
        remaining = len(jobs)
        while remaining:
            try:
                done.get()
                remaining -= 1
            except BaseException as error:
                interrupted(error)

    def _share_cores(self) -> None:
        """Gives each CPU worker its part of the caller's intra-op threads; otherwise each would use all cores."""
        threads = torch.get_num_threads()
        if threads == self._intra_op_threads:
            return
        self._intra_op_threads = threads
        share = max(1, threads // max(1, self._cpu_workers))
        done: SimpleQueue[None] = SimpleQueue()

        def set_share() -> None:
            torch.get_num_threads()  # a thread's first question would overwrite what was set before it
            torch.set_num_threads(share)

        for queue in self._queues:
            queue.put((set_share, done))
        for _ in self._queues:
            done.get()
        # The setting is each thread's own, but what a worker sets is also what threads born later start with.
        torch.set_num_threads(threads)


def _serve(queue: SimpleQueue[Any], device: WorkerDevice) -> None:
    device.enter_thread()
    with torch.autograd.set_multithreading_enabled(False):
        # A backward must run on the worker that calls it: the engine's thread of a device is one for all, and
        # workers would wait for each other.
        while True:
            task = queue.get()
            if task is None:
                return
            job, done = task
            del task
            job()
            # Whoever waits may drop the mini-batch and expect its memory back at once: no reference may linger here.
            del job
            done.put(None)
            del done


def _end(queues: list[SimpleQueue[Any]], threads: list[threading.Thread]) -> None:
    for queue in queues:
        queue.put(None)
    for thread in threads:
        if thread is not threading.current_thread() and thread.is_alive():
            thread.join()
