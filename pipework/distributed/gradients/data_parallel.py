"""Data parallelism: the mean of the replicas' gradients, stage by stage, while other stages still compute.

A stage's gradients are put into buckets of one memory each as soon as the last of them is there, and the buckets are
summed over the replicas in the background. A parameter without a gradient takes part with zeros, since another
replica's may have one; one that got none on any replica has none in the end.

Gradients are divided by the number of replicas and then added up in their own dtype, as DistributedDataParallel does:
with bfloat16 or float16, every addition rounds to that. Values of parameters and buffers travel as bytes, so that
every dtype arrives bit by bit.

Buckets of replicas that train different parameters would not fit each other: gloo would end the process, or add up
what does not belong together. Hence each step begins with a comparison, which is done long before the first bucket.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.distributed import DistError

from pipework.distributed.gradients.trained_parameters import TrainedParameters
from pipework.distributed.transport.channel import LostConnectionError, break_group
from pipework.distributed.transport.tensor_bytes import as_bytes, write_bytes

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from torch import Tensor

    from pipework.distributed.transport.channel import Group

BUCKET = 25 * 1024 * 1024  # bytes
_COMPARES = 1  # the first number of the first words of a training step; 0 of other calls


class _Begun(NamedTuple):
    """Gradients on their way.

    Attributes:
        works: end when they are there.
        leaves: whose gradients they are.
        present: at last, on how many replicas each has one.
    """

    works: list[Any]
    leaves: Sequence[Tensor]
    present: Tensor


class _Compared(NamedTuple):
    """What the replicas train, on its way.

    Attributes:
        work: ends when the sum of all is there.
        mine: of this replica.
        total: at last, how many replicas are in a training step, and the sum of their digests.
    """

    work: Any
    mine: Tensor
    total: Tensor


class DataParallel:
    """The ranks that hold the same stages as this one, each trained on other data.

    Args:
        group: of these ranks.
        ranks: their numbers in the job.
        device_channel: a group of the same ranks for what lies on accelerators; None: the first one takes that, too.
    """

    def __init__(self, group: Group, ranks: Sequence[int], device_channel: Group | None = None) -> None:
        self._group: Any = group
        self._device_channel: Any = device_channel
        self._ranks = ranks
        self._lock = threading.Lock()
        self._aborted = False
        self._begun: list[_Begun] = []
        self._compared: _Compared | None = None
        self._trained = TrainedParameters(())

    def share_values(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Gives all replicas the values of the first.

        Args:
            tensors: parameters and buffers by their names, the same ones in the same order on all replicas.

        Raises:
            TypeError: the memory of one cannot be sent, or its gradient could not be added up.
            LostConnectionError: a replica is gone.
        """
        named = list(tensors)
        self._trained = TrainedParameters(named)
        for name, tensor in named:
            if tensor.is_meta:
                continue  # on all replicas alike: it waits for a state dict
            data = as_bytes(name, tensor)
            if data.numel():
                self._wait(self._start("broadcast", data, 0))
                write_bytes(data, tensor)

    def compare(self, parameters: Sequence[Tensor]) -> None:
        """At the beginning of a step: begins to compare what the replicas train. Any of them may have frozen a layer.

        Args:
            parameters: that get a gradient in this step.

        Raises:
            TypeError: the gradient of one cannot be added up.
        """
        mine = self._trained.told(parameters)
        total = torch.tensor([_COMPARES, int(mine[-1]), 0])
        compared = _Compared(self._start("allreduce", total), mine, total)
        with self._lock:
            if not self._aborted:
                self._compared = compared

    def begin(self, leaves: Sequence[Tensor]) -> None:
        """Begins to average gradients, which nobody may touch before `finish`.

        Args:
            leaves: in whose `.grad` they are.

        Raises:
            ValueError: the replicas train different parameters.
            TypeError: a gradient is sparse.
            LostConnectionError: a replica is gone.
        """
        self._end_comparison()
        for leaf in leaves:
            if leaf.grad is not None and leaf.grad.layout is not torch.strided:
                raise TypeError(
                    f"the gradient of a parameter of shape {tuple(leaf.shape)} has the layout {leaf.grad.layout}, and "
                    "replicas average dense ones: make the layer without sparse=True"
                )
        present = torch.tensor([leaf.grad is not None for leaf in leaves], dtype=torch.int32)
        works = []
        for bucket in _buckets(leaves):
            sizes = [leaf.numel() for leaf in bucket]
            flat = torch.empty(sum(sizes), dtype=bucket[0].dtype, device=bucket[0].device)
            for leaf, part in zip(bucket, flat.split_with_sizes(sizes), strict=True):
                view = part.view(leaf.shape)
                if leaf.grad is None:
                    view.zero_()
                else:
                    view.copy_(leaf.grad)
                leaf.grad = view
            numbers = torch.view_as_real(flat) if flat.is_complex() else flat
            numbers.div_(len(self._ranks))  # before the sum, as DistributedDataParallel does
            works.append(self._start("allreduce", numbers))
        if leaves:
            works.append(self._start("allreduce", present))
        with self._lock:
            if not self._aborted:
                self._begun.append(_Begun(works, leaves, present))

    def finish(self) -> None:
        """Waits until all that was begun is there.

        Raises:
            ValueError: the replicas train different parameters.
            LostConnectionError: a replica is gone.
        """
        self._end_comparison()
        while True:
            with self._lock:
                if self._aborted:
                    raise LostConnectionError(None)
                if not self._begun:
                    return
                begun = self._begun.pop(0)
            try:
                while begun.works:
                    self._wait(begun.works.pop())
            finally:
                begun.works.clear()  # an error may be kept for long, and with it this frame and what that holds
            for leaf, count in zip(begun.leaves, begun.present.tolist(), strict=True):
                if not count:
                    leaf.grad = None

    def any_of(self, flag: bool) -> bool:
        """Whether the flag is set on any replica."""
        total = torch.tensor([0, 0, int(flag)])
        self._wait(self._start("allreduce", total))
        self._refuse_another_call(total, 0)
        return bool(total[2])

    def abort(self) -> None:
        """Ends all transfers for good, and lets go of what was begun; from any thread."""
        with self._lock:
            self._aborted = True
            self._begun.clear()
            self._compared = None
        break_group(self._group)
        if self._device_channel is not None:
            self._device_channel.abort()

    def _end_comparison(self) -> None:
        with self._lock:
            compared, self._compared = self._compared, None
        if compared is None:
            return
        self._wait(compared.work)
        self._refuse_another_call(compared.total, _COMPARES)
        if compared.total[1] != compared.mine[-1] * len(self._ranks):  # all replicas see it, and say more
            total = compared.mine.clone()
            self._wait(self._start("allreduce", total))
            self._trained.refuse_differences(compared.mine, total, len(self._ranks))

    def _refuse_another_call(self, total: Tensor, mine: int) -> None:
        """The first words of every call have one form: gloo ends a process that gets more than it has asked for."""
        if total[0] != mine * len(self._ranks):
            raise LostConnectionError(None)  # the monitor knows who is where

    def _start(self, collective: str, tensor: Tensor, *options: Any) -> Any:
        """Starts something that all replicas do. What is wrong with the tensor itself is no lost connection."""
        group = self._group if tensor.is_cpu or self._device_channel is None else self._device_channel
        try:
            return getattr(group, collective)(tensor, *options)
        except DistError as error:
            raise LostConnectionError(None) from error

    def _wait(self, work: Any) -> None:
        try:
            work.wait()
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            raise LostConnectionError(None) from error
        finally:
            del work  # it keeps the tensor


def _buckets(leaves: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Consecutive leaves of one dtype and device, up to a number of bytes."""
    bucket: list[Tensor] = []
    size = 0
    for leaf in leaves:
        alike = not bucket or (bucket[0].dtype, bucket[0].device) == (leaf.dtype, leaf.device)
        if bucket and (not alike or size + leaf.nbytes > BUCKET):
            yield bucket
            bucket, size = [], 0
        bucket.append(leaf)
        size += leaf.nbytes
    if bucket:
        yield bucket
