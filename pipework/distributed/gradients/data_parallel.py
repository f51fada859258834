"""Data parallelism: the mean of the replicas' gradients, stage by stage, while other stages still compute.

As soon as all gradients of a stage exist they are copied into buckets, contiguous pieces of memory, which are summed
over the replicas in the background. A parameter without a gradient takes part with zeros, since it may have one on
another replica; a parameter that has none on any replica has none in the end.

Gradients are divided by the number of replicas and then added up in their own dtype, as DistributedDataParallel does:
with bfloat16 or float16, every addition rounds to that. Values of parameters and buffers travel as bytes, so that
every dtype arrives bit by bit.

Buckets of replicas that train different parameters have different contents: gloo would end the process, or add
gradients of different parameters. So each step begins with a comparison, which ends long before the first bucket.
"""

from __future__ import annotations

import hashlib
import threading
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch
from torch.distributed import DistError, ReduceOp

from pipework import torch_private
from pipework.distributed.transport.groups import LostConnectionError, break_group
from pipework.values.dtensor import is_dtensor, local_part, with_local_part

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from torch import Tensor

    from pipework.distributed.transport.groups import Group

BUCKET = 25 * 1024 * 1024  # bytes
_COMPARES = 1  # the first number that a training step exchanges; 0 for other calls
_COUNTS = 4  # and for a comparison of numbers
_DEVICES_OF_GLOO = ("cpu", "cuda")
_LATEST = (1 << 48) - 1  # the marks that are compared: a sum of many replicas has 64 bits
_SUMMED: Final = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})  # by gloo and by NCCL
_SHOWN: Final = 5  # names in a message
_OF_SIZE: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}  # bytes


class TrainedParameters:
    """The parameters that one replica trains: the sum of fingerprints over replicas shows whether all train the same.

    A layer may be frozen or unfrozen between any two steps, and only the ranks that average its gradients must know. So
    this is no part of the comparison of all ranks at the start, but is compared in each step.

    Args:
        named: the parameters at the beginning, and perhaps other tensors, the same names on all replicas.

    Raises:
        TypeError: the gradient of a parameter could not be averaged.

    Example:
        >>> weight, bias = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
        >>> replica = TrainedParameters([("weight", weight), ("bias", bias)])
        >>> here, there = replica.fingerprint([weight, bias]), replica.fingerprint([weight])
        >>> replica.refuse_differences(here, here + here, 2)
        >>> replica.refuse_differences(here, here + there, 2)
        Traceback (most recent call last):
        ValueError: the replicas train different parameters: bias is trained by some of them only. Freeze, unfreeze,
        convert and replace parameters on all replicas
    """

    def __init__(self, named: Iterable[tuple[str, Tensor]]) -> None:
        named = list(named)
        for name, tensor in named:
            if tensor.requires_grad:
                _refuse_to_sum(name, tensor)
        # No weak references: with one, PyTorch cannot give memory to a parameter on the meta device.
        self._known = named
        self._forms: list[Any] | None = None  # of the parameters of the last step
        self._fingerprint = torch.empty(0)

    def fingerprint(self, parameters: Sequence[Tensor]) -> Tensor:
        """The parameters that a step trains: 0 or 1 for each tensor known by name, and a digest of the forms of all.

        Args:
            parameters: that get a gradient, in the order in which these are averaged.

        Raises:
            TypeError: a gradient cannot be averaged.
        """
        forms = [(id(each), each.dtype, each.shape) for each in parameters]
        if forms != self._forms:
            self._fingerprint, self._forms = self._compute(parameters), forms
        return self._fingerprint

    def refuse_differences(self, mine: Tensor, total: Tensor, replicas: int) -> None:
        """Raises an error if the replicas train different parameters.

        Args:
            mine: the fingerprint of this replica.
            total: the sum of all fingerprints.
            replicas: their number.

        Raises:
            ValueError: that is so; it is raised on at least one of them.
        """
        if torch.equal(total, mine * replicas):
            return
        pairs = zip(self._known, total.tolist()[:-1], strict=True)
        names = [name for (name, _), count in pairs if 0 < count < replicas]
        which = ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")
        what = f"{which} {'is' if len(names) == 1 else 'are'} trained by some of them only"
        raise ValueError(
            f"the replicas train different parameters: {what if names else 'their shapes, dtypes or order differ'}. "
            "Freeze, unfreeze, convert and replace parameters on all replicas"
        )

    def _compute(self, parameters: Sequence[Tensor]) -> Tensor:
        names = {id(tensor): name for name, tensor in self._known}
        for parameter in parameters:
            _refuse_to_sum(names.get(id(parameter), "that was replaced"), parameter)
        trained = {names.get(id(parameter)) for parameter in parameters}
        forms = str([(names.get(id(each)), each.dtype, tuple(each.shape)) for each in parameters])
        digest = int.from_bytes(hashlib.sha256(forms.encode()).digest()[:6])  # small: a sum of many has 64 bits
        return torch.tensor([*(name in trained for name, _ in self._known), digest], dtype=torch.int64)


def _refuse_to_sum(name: str, parameter: Tensor) -> None:
    if parameter.dtype.to_real() not in _SUMMED:
        raise TypeError(
            f"the parameter {name}, of {parameter.dtype} and shape {tuple(parameter.shape)}, is trained, and its "
            "gradient cannot be averaged over replicas: keep it in float64, float32, bfloat16 or float16, or freeze it"
        )


class _Reduction(NamedTuple):
    """Gradients that are being averaged.

    Attributes:
        works: end when that is done.
        leaves: the tensors with these gradients.
        present: in the end, on how many replicas each has one.
    """

    works: list[Any]
    leaves: Sequence[Tensor]
    present: Tensor


class _Comparison(NamedTuple):
    """A comparison of the trained parameters that is under way.

    Attributes:
        work: ends when the sum over all replicas is computed.
        mine: the fingerprint of this replica.
        total: in the end, how many replicas are in a training step, and the sums of their digests and of their marks.
        delivered: the marks of this replica.
    """

    work: Any
    mine: Tensor
    total: Tensor
    delivered: int


class _ThroughHost(NamedTuple):
    """A collective of a copy on the CPU, for tensors on a device that gloo does not know."""

    work: Any
    on_host: Tensor
    tensor: Tensor

    def wait(self) -> None:
        """Waits for the result, and copies it to the device."""
        self.work.wait()
        self.tensor.copy_(self.on_host)


class DataParallel:
    """Averages gradients over the ranks that hold the same stages as this one.

    Args:
        group: of these ranks.
        ranks: their numbers in the job; an attribute, too.
        device_group: of the same ranks, for tensors on accelerators; None: the first group takes these, too.
        divisor: of the gradients: how many replicas there are, of which these may be some. None: as many as ranks.
    """

    def __init__(
        self, group: Group, ranks: Sequence[int], device_group: Group | None = None, divisor: int | None = None
    ) -> None:
        self._group: Any = group
        self._device_group: Any = device_group
        self.ranks = tuple(ranks)
        self._divisor = divisor or len(ranks)
        self._lock = threading.Lock()
        self._aborted = False
        self._reductions: list[_Reduction] = []
        self._comparison: _Comparison | None = None
        self._trained = TrainedParameters(())

    def extremes(self, numbers: Tensor) -> tuple[Tensor, Tensor]:
        """The lowest and the highest that any replica has of each of some integers; all replicas call this."""
        lowest, highest = numbers.clone(), numbers.clone()
        if len(numbers):
            self._wait(self._start("allreduce", lowest, ReduceOp.MIN))
            self._wait(self._start("allreduce", highest, ReduceOp.MAX))
        return lowest, highest

    def share_values(
        self, tensors: Iterable[tuple[str, Tensor]], trainable: Iterable[tuple[str, Tensor]] | None = None
    ) -> None:
        """Gives all replicas the values of the first one.

        Args:
            tensors: parameters and buffers by their names, the same ones in the same order on all replicas.
            trainable: those that `compare` will get, and others; None: `tensors`.

        Raises:
            TypeError: a tensor cannot be sent as bytes, or its gradient could not be summed.
            LostConnectionError: a replica is gone.
        """
        named = list(tensors)
        self._trained = TrainedParameters(named if trainable is None else trainable)
        for name, tensor in named:
            if tensor.is_meta:
                continue  # on all replicas: a state dict will fill it
            part = local_part(tensor)
            data = as_bytes(name, part)
            if data.numel():
                self._wait(self._start("broadcast", data, 0))
                write_bytes(data, part)

    def compare(self, parameters: Sequence[Tensor], delivered: int = 0) -> None:
        """At the beginning of a step: begins to compare the trained parameters. Any replica may have frozen a layer.

        Args:
            parameters: that get a gradient in this step.
            delivered: see `DeliveredLosses.marks`.

        Raises:
            TypeError: a gradient cannot be summed.
        """
        mine = self._trained.fingerprint(parameters)
        latest = delivered & _LATEST
        total = torch.tensor([_COMPARES, int(mine[-1]), latest])
        comparison = _Comparison(self._start("allreduce", total), mine, total, latest)
        with self._lock:
            if not self._aborted:
                self._comparison = comparison

    def begin(self, leaves: Sequence[Tensor]) -> None:
        """Begins to average gradients, which must not be used before `finish`.

        Args:
            leaves: the tensors with these gradients in `.grad`.

        Raises:
            ValueError: the replicas train different parameters, or brought other losses backward.
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
            parts = [local_part(leaf) for leaf in bucket]
            sizes = [part.numel() for part in parts]
            flat = torch.empty(sum(sizes), dtype=bucket[0].dtype, device=bucket[0].device)
            for leaf, part, piece in zip(bucket, parts, flat.split_with_sizes(sizes), strict=True):
                view = piece.view(part.shape)
                if leaf.grad is None:
                    view.zero_()
                else:
                    view.copy_(local_part(_placed_as(leaf.grad, leaf)))
                leaf.grad = with_local_part(view, leaf)
            numbers = torch.view_as_real(flat) if flat.is_complex() else flat
            numbers.div_(self._divisor)  # before the sum, as DistributedDataParallel does
            works.append(self._start("allreduce", numbers))
        if leaves:
            works.append(self._start("allreduce", present))
        with self._lock:
            if not self._aborted:
                self._reductions.append(_Reduction(works, leaves, present))

    def finish(self) -> None:
        """Waits until all gradients are averaged.

        Raises:
            ValueError: the replicas train different parameters.
            LostConnectionError: a replica is gone.
        """
        self._end_comparison()
        while True:
            with self._lock:
                if self._aborted:
                    raise LostConnectionError(None)
                if not self._reductions:
                    return
                reduction = self._reductions.pop(0)
            try:
                while reduction.works:
                    self._wait(reduction.works.pop())
            finally:
                reduction.works.clear()  # an error may be kept for long, and keeps this frame alive
            for leaf, count in zip(reduction.leaves, reduction.present.tolist(), strict=True):
                if not count:
                    leaf.grad = None

    def begin_any_of_each(self, flags: Sequence[bool]) -> Callable[[], list[bool]]:
        """Begins to ask for each flag whether it is set on any replica, after the comparison of what they train.

        Returns:
            Waits for the answer.
        """
        self._end_comparison()
        total = torch.tensor(list(flags), dtype=torch.int32)
        work = self._start("allreduce", total) if flags else None

        def finish() -> list[bool]:
            if work is not None:
                self._wait(work)
            return [bool(count) for count in total.tolist()]

        return finish

    def extremes_of(self, number: int) -> tuple[int, int]:
        """The lowest and the highest that any replica has of a positive number, in the middle of a call of all."""
        total = torch.tensor([_COUNTS, number, number**2])
        self._wait(self._start("allreduce", total))
        self._refuse_another_call(total, _COUNTS)
        if total[2] * len(self.ranks) == total[1] ** 2:  # only if all are equal
            return number, number
        lowest, highest = self.extremes(torch.tensor([number]))
        return int(lowest), int(highest)

    def any_of(self, flag: bool) -> bool:
        """Whether the flag is set on any replica."""
        total = torch.tensor([0, 0, int(flag)])
        self._wait(self._start("allreduce", total))
        self._refuse_another_call(total, 0)
        return bool(total[2])

    def abort(self) -> None:
        """Ends all transfers for good, and drops their tensors; from any thread."""
        with self._lock:
            self._aborted = True
            self._reductions.clear()
            self._comparison = None
        break_group(self._group)

    def _end_comparison(self) -> None:
        with self._lock:
            comparison, self._comparison = self._comparison, None
        if comparison is None:
            return
        self._wait(comparison.work)
        self._refuse_another_call(comparison.total, _COMPARES)
        if comparison.total[1] != comparison.mine[-1] * len(self.ranks):  # all replicas see this, and exchange more
            total = comparison.mine.clone()
            self._wait(self._start("allreduce", total))
            self._trained.refuse_differences(comparison.mine, total, len(self.ranks))
        if comparison.total[2] != comparison.delivered * len(self.ranks):
            raise ValueError(
                "loss.backward() was called on some replicas of the pipe and not on others, after one of the last "
                "calls: their weights are not the same any more. Call it on all ranks"
            )

    def _refuse_another_call(self, total: Tensor, mine: int) -> None:
        """Every call first sums a tensor of one form, since gloo ends a process that receives more than it expects."""
        if total[0] != mine * len(self.ranks):
            raise LostConnectionError(None)  # the monitor knows in which call each rank is

    def _start(self, collective: str, tensor: Tensor, *options: Any) -> Any:
        """Starts a collective of all replicas. An error about the tensor itself is no lost connection."""
        on_host = tensor if tensor.device.type in _DEVICES_OF_GLOO else tensor.cpu()
        group = self._group
        if self._device_group is not None and not tensor.is_cpu:
            group, on_host = self._device_group, tensor
        try:
            work = getattr(group, collective)(on_host, *options)
        except DistError as error:
            raise LostConnectionError(None) from error
        return work if on_host is tensor else _ThroughHost(work, on_host, tensor)

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
        fits = not bucket or (bucket[0].dtype, bucket[0].device) == (leaf.dtype, leaf.device)
        if bucket and (not fits or size + leaf.nbytes > BUCKET):
            yield bucket
            bucket, size = [], 0
        bucket.append(leaf)
        size += leaf.nbytes
    if bucket:
        yield bucket


def _placed_as(gradient: Tensor, leaf: Tensor) -> Tensor:
    """A gradient in the placement of its leaf: autograd may leave that of a replicated DTensor in partial sums."""
    if is_dtensor(gradient) and is_dtensor(leaf) and gradient.placements != leaf.placements:
        return gradient.redistribute(placements=leaf.placements)
    return gradient


# ---- the bytes of a tensor of any dtype: integers of the same size, which every operator copies exactly --------------


def as_bytes(name: str, tensor: Tensor) -> Tensor:
    """The bytes of the elements in contiguous order; the tensor's own memory if it is contiguous.

    Args:
        name: of the tensor in errors.
        tensor: on any device.

    Raises:
        TypeError: it is sparse, quantized or a wrapper of other tensors.

    Example:
        >>> as_bytes("x", torch.tensor([[1, 2], [3, 4]], dtype=torch.int16).t()).tolist()
        [1, 0, 3, 0, 2, 0, 4, 0]
    """
    what = None
    if tensor.layout is not torch.strided:
        what = f"has the layout {tensor.layout}"
    elif tensor.is_quantized:
        what = f"is quantized, {tensor.dtype}"
    elif torch_private.is_wrapper_subclass(tensor):
        what = f"is a {type(tensor).__qualname__}, which stands for other tensors"
    if what is not None:
        raise TypeError(
            f"{name} {what}, so its values cannot be sent to other replicas as bytes: keep it as a dense torch.Tensor, "
            "or not as a parameter or buffer"
        )
    return _integers(tensor.resolve_conj().resolve_neg()).contiguous().reshape(-1).view(torch.uint8)


def write_bytes(data: Tensor, tensor: Tensor) -> None:
    """Writes bytes that `as_bytes` returned into a tensor of the same shape and dtype.

    Example:
        >>> half = torch.zeros(2, dtype=torch.float16)
        >>> write_bytes(as_bytes("x", torch.ones(2, dtype=torch.float16)), half)
        >>> half
        tensor([1., 1.], dtype=torch.float16)
    """
    if data.data_ptr() == tensor.data_ptr() and tensor.is_contiguous():
        return
    with torch.no_grad():
        if tensor.is_conj() or tensor.is_neg():
            tensor.copy_(data.view(tensor.dtype).view(tensor.shape))
            return
        to = _integers(tensor)
        source = data.view(to.dtype).view(to.shape)
        for dimension, stride in enumerate(to.stride()):
            if stride == 0:  # expanded: all elements along it share memory
                to, source = to.narrow(dimension, 0, 1), source.narrow(dimension, 0, 1)
        to.copy_(source)


def _integers(tensor: Tensor) -> Tensor:
    plain = tensor.detach()
    if type(plain) is not torch.Tensor:
        plain = plain.as_subclass(torch.Tensor)
    return plain.view(_OF_SIZE[plain.itemsize])
