"""Data parallelism: the mean of the replicas' gradients, stage by stage, while other stages still compute.

As soon as all gradients of a stage exist they are copied into buckets, contiguous pieces of memory, which are summed
over the replicas in the background. A parameter without a gradient takes part with zeros, since it may have one on
another replica; a parameter that has none on any replica has none in the end.

Gradients are divided by the number of replicas and then added up in their own dtype, as DistributedDataParallel does:
with bfloat16 or float16, every addition rounds to that. Values of parameters and buffers travel as bytes, so that
every dtype arrives bit by bit.

Which gradients are averaged over which replicas:

    most parameters                              over all replicas
    local over some dimensions, or a DTensor     over the replicas that have the same; see `SharedTensors`
    a parameter that only this rank has          divided by the number of replicas
    what FSDP shards                             reduced by FSDP, see `FullySharded`

The loss is the mean of the replicas' losses. A parameter that one rank alone has was used by the rows of all replicas,
so its gradient is already the sum, and is divided. Of one that several ranks have, each has the gradient of some rows.

Buckets of replicas that train different parameters have different contents: gloo would end the process, or add
gradients of different parameters. So each step begins with a comparison, which ends long before the first bucket.
"""

from __future__ import annotations

import hashlib
import json
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch
from torch.distributed import DistError

from pipework import torch_private
from pipework.distributed.transport import groups
from pipework.values.dtensor import is_dtensor, local_part, with_local_part

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from contextlib import AbstractContextManager

    from torch import Tensor

    from pipework.autograd.aliases import Aliases
    from pipework.autograd.fully_sharded import FullySharded
    from pipework.distributed.shared_tensors import SharedTensors
    from pipework.distributed.transport.groups import Group
    from pipework.runtime.run_spec import RunSpec

BUCKET = 25 * 1024 * 1024  # bytes
_DEVICES_OF_GLOO = ("cpu", "cuda")
_SUMMED: Final = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})  # by gloo and by NCCL
_SHOWN: Final = 5  # names in a message
_OF_SIZE: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}  # bytes


def _refuse_to_sum(name: str, parameter: Tensor) -> None:
    if parameter.dtype.to_real() not in _SUMMED:
        raise TypeError(
            f"the parameter {name}, of {parameter.dtype} and shape {tuple(parameter.shape)}, is trained, and its "
            "gradient cannot be averaged over replicas: keep it in float64, float32, bfloat16 or float16, or freeze it"
        )


class _Reduction(NamedTuple):
    """Gradients that are being averaged.

    Attributes:
        works: of PyTorch; each ends when a bucket is averaged.
        leaves: the tensors that have the gradients.
        present: of each leaf, on how many replicas it has a gradient; known when all works have ended.
    """

    works: list[Any]
    leaves: Sequence[Tensor]
    present: Tensor


class _ThroughHost(NamedTuple):
    """A collective on the CPU, for a tensor on a device that gloo does not know: a copy of the tensor takes part."""

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
        group: of these ranks, for tensors on the CPU; an attribute, too.
        ranks: their numbers in the job; likewise.
        device_group: of the same ranks, for tensors on accelerators; None: `group` takes these, too.
        divisor: gradients are divided by it. It is the number of all replicas, and these ranks may be some of them.
    """

    def __init__(self, group: Group, ranks: Sequence[int], device_group: Group | None, divisor: int) -> None:
        self.group: Any = group
        self._device_group: Any = device_group
        self.ranks = tuple(ranks)
        self._divisor = divisor
        self._lock = threading.Lock()
        self._aborted = False
        self._reductions: list[_Reduction] = []
        self._comparison: tuple[Callable[[], Tensor], str] | None = None  # under way, and what this replica trains
        # No weak references: with one, PyTorch cannot give memory to a parameter on the meta device.
        self._known: list[tuple[str, Tensor]] = []
        self._trained: tuple[list[Any], tuple[str, int]] = [], ("[]", 0)  # the parameters of the last step

    def share_values(self, tensors: Iterable[tuple[str, Tensor]], trainable: list[tuple[str, Tensor]]) -> None:
        """Gives all replicas the values of the first one.

        Args:
            tensors: parameters and buffers by their names, the same ones in the same order on all replicas.
            trainable: those that `compare` will get, and others.

        Raises:
            TypeError: a tensor cannot be sent as bytes, or its gradient could not be summed.
            LostConnectionError: a replica is gone.
        """
        self._known = trainable
        for name, tensor in trainable:
            if tensor.requires_grad:
                _refuse_to_sum(name, tensor)
        for name, tensor in tensors:
            if tensor.is_meta:
                continue  # on all replicas: a state dict will fill it
            part = local_part(tensor)
            data = _bytes_of(name, part)
            if data.numel():
                self._wait(self._start("broadcast", data, 0))
                _write(data, part)

    def compare(self, parameters: Sequence[Tensor], delivered: str = "", micro_batches: int = 0) -> None:
        """At the beginning of a step: begins to compare the trained parameters. Any replica may have frozen a layer.

        Args:
            parameters: that get a gradient in this step.
            delivered: see `DeliveredLosses.marks`.
            micro_batches: of which all replicas need as many; 0: each may have its own number.

        Raises:
            TypeError: a gradient cannot be summed.
        """
        trained, number = self._describe(parameters)
        numbers = number, _number_of(delivered), micro_batches
        comparison = groups.begin_exchange(self.group, groups.COMPARISON, numbers), trained
        with self._lock:
            if not self._aborted:
                self._comparison = comparison

    def _describe(self, parameters: Sequence[Tensor]) -> tuple[str, int]:
        """The names, dtypes and shapes of parameters that get a gradient, as JSON, and a number for these."""
        forms = [(id(each), each.dtype, each.shape) for each in parameters]
        if forms != self._trained[0]:
            names = {id(tensor): name for name, tensor in self._known}
            for each in parameters:
                _refuse_to_sum(names.get(id(each), "that was replaced"), each)
            text = json.dumps([(names.get(id(each)), str(each.dtype), each.shape) for each in parameters])
            self._trained = forms, (text, _number_of(text))
        return self._trained[1]

    def begin(self, leaves: Sequence[Tensor]) -> None:
        """Begins to average gradients, which must not be used before `finish`.

        Args:
            leaves: the tensors with these gradients in `.grad`.

        Raises:
            ValueError: the replicas train different parameters, or brought other losses backward.
            TypeError: a gradient is sparse.
            LostConnectionError: a replica is gone.
        """
        self.end_comparison()
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
        self.end_comparison()
        while True:
            with self._lock:
                if self._aborted:
                    raise groups.LostConnectionError(None)
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
        self.end_comparison()
        wait = groups.begin_gather(self.group, [int(flag) for flag in flags])
        return lambda: wait().any(0).tolist()

    def abort(self) -> None:
        """Ends all transfers for good, and drops their tensors; from any thread."""
        with self._lock:
            self._aborted = True
            self._reductions.clear()
            self._comparison = None
        groups.break_group(self.group)

    def end_comparison(self) -> None:
        """Waits until the replicas are compared.

        Raises:
            ValueError: they train different parameters, have other numbers of micro-batches, or brought other losses
                backward.
            LostConnectionError: a replica is gone.
        """
        with self._lock:
            comparison, self._comparison = self._comparison, None
        if comparison is None:
            return
        wait, mine = comparison
        rows = wait()
        lowest, highest = rows[:, 2].aminmax()
        if lowest != highest:
            raise ValueError(
                f"the replicas have {lowest} to {highest} micro-batches, and whole_stages, or layers with "
                "local_parameters or with DTensors over the replicas, need as many on each: give all mini-batches of "
                "one size, such as by pipe.sampler(dataset, drop_last=True)"
            )
        if (rows[:, 0] != rows[0, 0]).any():  # all replicas see this, and exchange more
            self._refuse_differences(groups.all_gather(self.group, mine.encode()))
        if (rows[:, 1] != rows[0, 1]).any():
            raise ValueError(
                "loss.backward() was called on some replicas of the pipe and not on others, after one of the last "
                "calls: their weights are not the same any more. Call it on all ranks"
            )

    def _refuse_differences(self, texts: Sequence[bytes]) -> None:
        """Raises a ValueError: the replicas train different parameters, as `_describe` tells."""
        trained = [{name for name, _, _ in json.loads(text)} for text in texts]
        some = set().union(*trained).difference(set.intersection(*trained))
        names = [name for name, _ in self._known if name in some]
        which = ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")
        what = f"{which} {'is' if len(names) == 1 else 'are'} trained by some of them only"
        raise ValueError(
            f"the replicas train different parameters: {what if names else 'their shapes, dtypes or order differ'}. "
            "Freeze, unfreeze, convert and replace parameters on all replicas"
        )

    def _start(self, collective: str, tensor: Tensor, *options: Any) -> Any:
        """Starts a collective of all replicas. An error about the tensor itself is no lost connection."""
        on_host = tensor if tensor.device.type in _DEVICES_OF_GLOO else tensor.cpu()
        group = self.group
        if self._device_group is not None and not tensor.is_cpu:
            group, on_host = self._device_group, tensor
        try:
            work = getattr(group, collective)(on_host, *options)
        except DistError as error:
            raise groups.LostConnectionError(None) from error
        return work if on_host is tensor else _ThroughHost(work, on_host, tensor)

    def _wait(self, work: Any) -> None:
        try:
            with groups.transferring():
                work.wait()
        finally:
            del work  # it keeps the tensor


@dataclass(frozen=True, eq=False)
class Averaging:
    """Averages the gradients of one rank, each over the replicas that share its parameter.

    Attributes:
        every: the groups of replicas over which gradients are averaged; the first has all. Empty: there is one replica.
        tensors: of this rank.
        waits: gives a context, in which this rank waits for others.
        gathers_in_order: whether FSDP gathers weights in an order that depends on the number of micro-batches.
    """

    every: Sequence[DataParallel]
    tensors: SharedTensors
    waits: Callable[[], AbstractContextManager[object]]
    gathers_in_order: bool

    def compare(self, spec: RunSpec, delivered: str) -> bool:
        """At the beginning of a run: begins to compare the replicas.

        Args:
            spec: of the run.
            delivered: see `DeliveredLosses.marks`.

        Returns:
            Whether the comparison must end before the first action: layers may call collectives for each micro-batch.
        """
        counts = self._needs_equal_counts(spec)
        trained = [each for run in spec.runs.values() for each in run.aliases.parameters if spec.differentiates]
        for replicas in self.every if spec.differentiates or counts else ():
            compared = [each for each in trained if self.tensors.is_compared(each, replicas.ranks)]
            replicas.compare(compared, delivered, spec.micro_batches if counts else 0)
        return counts

    def _needs_equal_counts(self, spec: RunSpec) -> bool:
        """Whether all replicas must have as many micro-batches."""
        runs = spec.runs.values()
        if not self.every:
            return False
        if self.gathers_in_order and any(run.sharded is not None for run in runs):
            return True
        exchange = self.tensors.any_are_local or any(self._in_parts(run.aliases) for run in runs)
        return spec.differentiates and exchange

    def end_comparison(self) -> None:
        """Waits until the replicas are compared. Raises a ValueError on all of them if they differ."""
        with self.waits():
            for replicas in self.every:
                replicas.end_comparison()

    def begin(self, spec: RunSpec, stage: int) -> None:
        """Begins to average the gradients of a stage, which are complete."""
        aliases = spec.runs[stage].aliases
        if aliases.sharded is not None:
            self._begin_sharded(spec, aliases, aliases.sharded)
        if not self.every:
            return
        self._complete_parts(aliases)
        shared: dict[tuple[int, ...], list[Tensor]] = {each.ranks: [] for each in self.every}
        for parameter, leaf in _not_of_fsdp(aliases):
            if ranks := self.tensors.averaged_over(parameter):
                shared[ranks].append(leaf)
            elif leaf.grad is not None:
                leaf.grad.div_(len(self.every[0].ranks))
        with self.waits():  # at first until all replicas have said what they train in this step
            for replicas in self.every:
                replicas.begin(shared[replicas.ranks])

    def finish(self, spec: RunSpec) -> None:
        """After the last action: waits for all averages."""
        _finish_sharded(spec)
        if spec.differentiates:
            for replicas in self.every:
                replicas.finish()

    def _complete_parts(self, aliases: Aliases) -> None:
        """Gives zeros to a part of a DTensor that no row has used here, if other replicas have gradients of theirs.

        Either all parts of a DTensor have a gradient or none, because their ranks take the norm together.
        """
        leaves = self._in_parts(aliases)
        if leaves:
            with self.waits():
                present = self.every[0].begin_any_of_each([leaf.grad is not None for leaf in leaves])()
            for leaf, wanted in zip(leaves, present, strict=True):
                if wanted and leaf.grad is None:
                    leaf.grad = torch.zeros_like(leaf)

    def _in_parts(self, aliases: Aliases) -> list[Tensor]:
        """The leaves of DTensors of which replicas have different parts. FSDP takes care of its own."""
        if aliases.dtensor is None:  # as in most models
            return []
        return [leaf for parameter, leaf in _not_of_fsdp(aliases) if self.tensors.in_parts(parameter)]

    def _begin_sharded(self, spec: RunSpec, aliases: Aliases, sharded: FullySharded) -> None:
        present = sharded.present(aliases.parameters, aliases.leaves)
        with self.waits():
            _finish_sharded(spec)  # those of an earlier stage, so that only one stage holds buffers
            wanted = self.every[0].begin_any_of_each(present) if self.every else lambda: present
            sharded.begin_reduce(aliases.parameters, aliases.leaves, wanted)


def _not_of_fsdp(aliases: Aliases) -> Iterator[tuple[Tensor, Tensor]]:
    """Each parameter that FSDP does not shard, with its leaf."""
    for parameter, leaf in zip(aliases.parameters, aliases.leaves, strict=True):
        if aliases.sharded is None or not aliases.sharded.has(parameter):
            yield parameter, leaf


def _finish_sharded(spec: RunSpec) -> None:
    """Waits for the gradients of shards that are being reduced."""
    for run in spec.runs.values():
        gradients = None if run.sharded is None else run.sharded.finish_reduce()
        if gradients is not None:
            run.aliases.set_reduced(gradients)


def _number_of(text: str) -> int:
    """A number that stands for a text when replicas compare it."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7])


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
    """A gradient in the placement of its leaf. Of a replicated DTensor, autograd may leave partial sums."""
    if is_dtensor(gradient) and is_dtensor(leaf) and gradient.placements != leaf.placements:
        return gradient.redistribute(placements=leaf.placements)
    return gradient


def _bytes_of(name: str, tensor: Tensor) -> Tensor:
    """The bytes of the elements in contiguous order; the tensor's own memory if it is contiguous.

    Args:
        name: of the tensor in errors.
        tensor: on any device.

    Raises:
        TypeError: it is sparse, quantized or a wrapper of other tensors.
    """
    if tensor.layout is not torch.strided or tensor.is_quantized or torch_private.is_wrapper_subclass(tensor):
        raise TypeError(
            f"{name} ({type(tensor).__qualname__}, {tensor.dtype}, {tensor.layout}) cannot be sent to other replicas "
            "as bytes: keep it as a dense torch.Tensor, or not as a parameter or buffer"
        )
    plain = tensor.detach().as_subclass(torch.Tensor).resolve_conj().resolve_neg()
    return _integers(plain).contiguous().reshape(-1).view(torch.uint8)


def _write(data: Tensor, tensor: Tensor) -> None:
    """Writes bytes that `_bytes_of` returned into a tensor of the same shape and dtype."""
    to, source = tensor.detach().as_subclass(torch.Tensor), data.view(tensor.dtype).view(tensor.shape)
    if source.data_ptr() == to.data_ptr():
        return
    if not (to.is_conj() or to.is_neg()):
        to, source = _integers(to), _integers(source)
    for dimension, stride in enumerate(to.stride()):
        if stride == 0:  # expanded: all elements along it share memory
            to, source = to.narrow(dimension, 0, 1), source.narrow(dimension, 0, 1)
    to.copy_(source)


def _integers(tensor: Tensor) -> Tensor:
    """A tensor of any dtype as integers of the same size, which every operator copies exactly."""
    return tensor.view(_OF_SIZE[tensor.itemsize])
