"""The steps of a `HostOptimizer` that begin during a backward, each stage's when its gradients are complete.

    worker of stage 1     F F B F B B 1             1  nothing reads the stage's parameters any more: the worker
    worker of stage 0   F F . F B . B . B 1            notes where its stream is, and goes on
    thread of the steps               2 2 2 2 2     2  steps, and beside them copies to the host and back
    caller                                3 . . 4   3  autograd delivers the gradients
                                                    4  the end: waits for 2, compares with 3, steps what is left

A step takes a gradient before it is delivered, so what is delivered must be the same memory, and unchanged. What cannot
be stepped early is known before 2, but for a gradient that comes from outside of the pipe as well, or a factor of the
loss. Then parameters have wrong values at 4, which is an error.
"""

from __future__ import annotations

import contextlib
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

import torch

from pipework import torch_private
from pipework.runtime.failure import add_note

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from torch import Tensor

    from pipework.executor import Executor
    from pipework.runtime.host_link import Group, HostLinks, Work
    from pipework.runtime.stage.stage_run import StageRun

    Make = Callable[[list[Work], set[int]], None]


class EarlySteps:
    """The early steps of one mini-batch.

    Args:
        make: makes the steps of some parameters, and adds the ids of those that it has changed to the set.
        finish: makes the steps that are left at the end, and does the same.
        groups: the parameters of the optimizer.
        links: of the optimizer.
        executor: of the pipe.

    Attributes:
        made: the ids of the parameters that are changed.
    """

    def __init__(
        self, make: Make, finish: Callable[[], object], groups: Iterable[Group], links: HostLinks, executor: Executor
    ) -> None:
        own = executor.parameters_of_one_stage
        self._make, self._finish, self._links, self._executor = make, finish, links, executor
        self._groups = {id(each): group for group in groups for each in group["params"] if id(each) in own}
        self._mini_batches = 0
        self._is_open = True
        self.made: set[int] = set()
        self._used: list[tuple[Tensor, Tensor, int]] = []  # parameter, gradient and its version
        self._jobs: list[Future[None]] = []
        self._thread = ThreadPoolExecutor(1, "pipework steps", _begin_thread, (torch.get_num_threads(),))

    def refuse_inside(self, what: str) -> None:
        """Raises an error before the end: a thread changes the parameters."""
        if self._is_open:
            raise RuntimeError(
                f"{what} within step_in_backward(pipe), which makes all steps, each when its gradients are complete: "
                "leave it out, or do it before the block or after it"
            )

    @contextlib.contextmanager
    def during(self) -> Iterator[None]:
        """A context around a call of the pipe and its backward; at its end all steps are made."""
        self._executor.early = self
        try:
            yield
            self._end()
            for job in self._jobs:
                job.result()
            self._refuse_other_gradients()
            self._finish()
        except BaseException as error:
            self._end(cancel=True)
            if self.made:
                add_note(
                    error,
                    f"{len(self.made)} parameters have been stepped in this backward already, others perhaps not: "
                    "load the last checkpoint before you go on",
                )
            raise
        finally:  # a loss that somebody keeps refers to this
            self._used, self._jobs = [], []

    def begin(self, *, grad: bool) -> None:
        """Called before each mini-batch of the pipe."""
        if self._jobs:
            raise RuntimeError(
                "the pipe was called again in step_in_backward(pipe), whose steps have begun: give each mini-batch one"
            )
        self._mini_batches += grad

    def complete(self, run: StageRun) -> None:
        """Called by a worker after the last action of a stage: its gradients are there, and nobody reads parameters."""
        if not self._is_open or self._mini_batches > 1:  # the gradients of several mini-batches are added up
            return
        if not run.in_place.sent.isdisjoint(map(torch_private.memory_of, run.aliases.leaves)):  # may still be read
            return
        device = run.stage.device
        work: list[Work] = [
            # Autograd takes over a gradient that nobody holds; this is another tensor with its memory and version.
            (self._groups[id(parameter)], parameter, leaf.grad.detach())
            for parameter, leaf in zip(run.aliases.parameters, run.aliases.leaves, strict=True)
            if id(parameter) in self._groups
            and parameter.device == device.device
            and leaf.grad is not None
            and _is_whole_gradient(parameter, leaf.grad)
        ]
        if work:
            self._used += [(parameter, gradient, torch_private.version(gradient)) for _, parameter, gradient in work]
            ready = None if device.stream is None else device.stream.record_event()
            self._jobs.append(self._thread.submit(self._make_all, work, device.device, ready))

    def _make_all(self, work: list[Work], device: torch.device, ready: torch.Event | None) -> None:
        self._links[device].begin(ready)
        self._make(work, self.made)

    def _end(self, *, cancel: bool = False) -> None:
        self._executor.early, self._is_open = None, False
        self._thread.shutdown(cancel_futures=cancel)
        for link in self._links.values():
            link.end()

    def _refuse_other_gradients(self) -> None:
        wrong = [each for each, used, version in self._used if not _is_same(each.grad, used, version)]
        if wrong:
            raise RuntimeError(
                f"{len(wrong)} parameters were stepped in the backward, such as one of shape {tuple(wrong[0].shape)}, "
                "and then got another .grad: the loss had no backward, or one with a factor or retain_graph=True; or "
                "they are used outside of the pipe, too; or gradients were clipped, unscaled, set to None, or changed "
                "by the optimizer or a wrapper such as DistributedDataParallel. Leave this out, or call "
                "loss.backward() and then optimizer.step()"
            )


def _begin_thread(intra_op_threads: int) -> None:
    """Takes as many as `step()` has: some optimizers add up in an order that depends on their number."""
    torch.get_num_threads()  # the first call on a thread resets the number, so it comes before the set
    torch.set_num_threads(intra_op_threads)


def _is_whole_gradient(parameter: Tensor, gradient: Tensor) -> bool:
    """Whether `.grad` will be this very gradient."""
    return (
        parameter.grad is None
        and gradient.layout is torch.strided
        and gradient.stride() == parameter.stride()
        and not torch_private.has_tensor_hooks(parameter)
    )


def _is_same(gradient: Tensor | None, used: Tensor, version: int) -> bool:
    return gradient is not None and gradient.data_ptr() == used.data_ptr() and torch_private.version(used) == version
