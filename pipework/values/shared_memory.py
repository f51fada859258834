"""Tensors of one message that share memory: they are carried as one, and share memory where they arrive.

In the un-partitioned module, a layer that changes one of them in place changes the others, too.
"""

from __future__ import annotations

import itertools
import math
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from pipework.values.tensor_form import extent


class SharedPart(NamedTuple):
    """A tensor that lies in memory which is carried for several.

    Attributes:
        number: of the tensor of the message in whose place that memory is.
        dtype: of its elements.
        shape: its sizes.
        strides: in elements.
        begin: the number of its first byte in the memory.
        conjugated: whether its elements are the conjugates of what is in memory.
        requires_grad: whether it requires a gradient.
    """

    number: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    begin: int
    conjugated: bool
    requires_grad: bool

    def of(self, memory: Tensor) -> Tensor:
        """The tensor. All parts of one memory have one version counter, so that autograd sees who changes it."""
        end = self.begin + extent(self.shape, self.strides) * self.dtype.itemsize
        part = memory[self.begin : end].view(self.dtype).as_strided(self.shape, self.strides)
        part = (part.conj() if self.conjugated else part).detach()
        return part.requires_grad_() if self.requires_grad else part


# For each tensor of a message, what it is a part of (None: it is carried by itself). Empty: there are no parts.
SharedParts: TypeAlias = "tuple[SharedPart | None, ...]"


def together(tensors: tuple[Tensor | None, ...]) -> tuple[tuple[Tensor | None, ...], SharedParts]:
    """What is carried of the tensors of a message: where some have elements in common, their memory as bytes, once.

    Example:
        >>> x = torch.arange(6, dtype=torch.uint8)
        >>> carried, parts = together((x[:4], None, x[3:], torch.ones(2)))
        >>> carried
        (tensor([0, 1, 2, 3, 4, 5], dtype=torch.uint8), None, None, tensor([1., 1.]))
        >>> apart(carried, parts)
        (tensor([0, 1, 2, 3], dtype=torch.uint8), None, tensor([3, 4, 5], dtype=torch.uint8), tensor([1., 1.]))
    """
    if len(tensors) < 2:
        return tensors, ()
    plain = {number: each for number, each in enumerate(tensors) if type(each) is torch.Tensor and _has_place(each)}
    storages = [each.data_ptr() - int(each.storage_offset()) * each.element_size() for each in plain.values()]
    if len({*storages}) == len(plain):  # the common case, without further cost
        return tensors, ()
    groups: dict[int, dict[int, Tensor]] = {}
    for (number, each), storage in zip(plain.items(), storages, strict=True):
        if not each.is_neg():  # whose memory has other numbers
            groups.setdefault(storage, {})[number] = each
    carried, parts = dict(enumerate(tensors)), dict[int, SharedPart]()
    for storage, group in groups.items():
        for begin, end, numbers in _clusters(group):
            first, own = min(numbers), [group[number] for number in numbers]
            if not any(share_memory(*pair) for pair in itertools.combinations(own, 2)):
                continue
            base = min(own, key=Tensor.element_size)  # whose size divides those of all others
            size = base.element_size()
            base = (base.conj() if base.is_conj() else base).detach()
            memory = base.as_strided(((end - begin) // size,), (1,), (begin - storage) // size).view(torch.uint8)
            carried |= dict.fromkeys(numbers) | {first: memory}
            for number, each in zip(numbers, own, strict=True):
                form = each.dtype, tuple(each.shape), each.stride(), each.data_ptr() - begin, each.is_conj()
                parts[number] = SharedPart(first, *form, each.requires_grad)
    return tuple(carried.values()), tuple(map(parts.get, carried)) if parts else ()


def _clusters(group: dict[int, Tensor]) -> list[tuple[int, int, list[int]]]:
    """The first and the last address of each range of memory that tensors cover, and their numbers."""
    clusters: list[tuple[int, int, list[int]]] = []
    for (begin, end), number in sorted((_extent(each), number) for number, each in group.items()):
        before = clusters.pop() if clusters and begin < clusters[-1][1] else (begin, end, [])
        clusters.append((before[0], max(end, before[1]), [*before[2], number]))
    return clusters


def apart(carried: tuple[Tensor | None, ...], parts: SharedParts) -> tuple[Tensor | None, ...]:
    """The tensors of a message, of which `together` has given what was carried, or copies of it."""
    if not parts:
        return carried
    pairs = zip(carried, parts, strict=True)
    return tuple([each if part is None else part.of(carried[part.number]) for each, part in pairs])  # type: ignore[arg-type]


def share_memory(one: Tensor, two: Tensor) -> bool:
    """Whether two tensors have an element in common, or may have one, judged by their first and last addresses."""
    if not (_has_place(one) and _has_place(two)):
        return False
    (begin, end), (other_begin, other_end) = _extent(one), _extent(two)
    return begin < other_end and other_begin < end and not _are_parts(one, two)


def _has_place(tensor: Tensor) -> bool:
    """Whether the tensor has an address; it has none on the meta device, or if it wraps other tensors."""
    return tensor.layout is torch.strided and not tensor.is_nested and tensor.numel() > 0 and tensor.data_ptr() != 0


def _extent(tensor: Tensor) -> tuple[int, int]:
    """The first address of the tensor, and the first address after it."""
    return tensor.data_ptr(), tensor.data_ptr() + extent(tensor.shape, tensor.stride()) * tensor.element_size()


def _are_parts(one: Tensor, two: Tensor) -> bool:
    """Whether they are disjoint slices of one array along one dimension, such as two halves of its channels."""
    if one.stride() != two.stride() or one.dtype != two.dtype:
        return False
    here, there = int(one.storage_offset()), int(two.storage_offset())
    outer, apart = math.inf, False
    for stride, size, other_size in sorted(zip(one.stride(), one.shape, two.shape, strict=True), reverse=True):
        if not stride:
            return False
        (begin, here), (other_begin, there) = divmod(here, stride), divmod(there, stride)
        end, other_end = begin + size, other_begin + other_size
        if outer < math.inf and max(end, other_end) * stride > outer:
            return False  # the slices overlap along this dimension, so they are not slices of one array
        apart = apart or end <= other_begin or other_end <= begin
        outer = stride
    return apart
