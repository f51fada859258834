"""How a tensor lies in memory: what a copy of it elsewhere needs, so that kernels give the same bits there.

Kernels add in an order that depends on strides and on alignment. So values keep both where they go to another process
or device.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from pipework.torch_private import ALIGNMENT
from pipework.values.dtensor import DTensorPlacement, is_dtensor, local_part

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor


_CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class TensorForm:
    """The properties of a tensor that a receiver needs to allocate memory for it.

    Kernels add in an order that depends on strides and on alignment, so a tensor arrives with those that it had.

    Attributes:
        dtype: of its elements.
        shape: its sizes.
        requires_grad: whether gradients are to be sent back.
        strides: None: those that PyTorch gives to a new tensor of this shape.
        on_accelerator: whether it is on the sender's accelerator, and is to be on the receiver's.
        shift: how many elements lie between an aligned address and its first one.
        placed: of a DTensor, of which all else describes the local part; None: it is none.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    requires_grad: bool
    strides: tuple[int, ...] | None = None
    on_accelerator: bool = False
    shift: int = 0
    placed: DTensorPlacement | None = None

    @classmethod
    def of(cls, tensor: Tensor) -> TensorForm:
        """The form of a tensor.

        Raises:
            TypeError: the tensor is not dense, or is of a subclass of Tensor.

        Example:
            >>> form = TensorForm.of(torch.zeros(3, 2).t()[1:])
            >>> form.shape, form.strides, form.shift
            ((1, 3), (1, 2), 1)
        """
        if is_dtensor(tensor):
            local = cls.of(local_part(tensor))
            return replace(local, requires_grad=tensor.requires_grad, placed=DTensorPlacement.of(tensor))
        # Only numbers are sent. A Parameter is sent as the tensor that it is after `detach()`.
        if type(tensor) is not torch.Tensor and type(tensor.detach()) is not torch.Tensor:
            raise TypeError(
                f"a tensor of the class {type(tensor).__module__}.{type(tensor).__qualname__} cannot be sent to "
                "another process, where it would arrive as a plain tensor: return tensor.as_subclass(torch.Tensor) if "
                "only the numbers are needed, or keep the layers that exchange it in one partition"
            )
        if tensor.layout is not torch.strided:
            raise TypeError(
                f"a tensor with the layout {tensor.layout} cannot be sent to another process: make it dense, "
                ".to_dense(), or keep the layers that exchange it in one partition"
            )
        usual = 0 in tensor.shape or tensor.stride() == usual_strides(tensor.shape)
        return cls(
            tensor.dtype,
            tuple(tensor.shape),
            tensor.requires_grad,
            None if usual else tensor.stride(),
            lies_on_accelerator(tensor),
            _shift(tensor),
        )

    @property
    def is_usual(self) -> bool:
        """Whether it is the form of a new tensor."""
        return self.strides is None and not self.shift

    @property
    def _all_strides(self) -> tuple[int, ...]:
        return usual_strides(self.shape) if self.strides is None else self.strides

    @property
    def sent_sizes(self) -> tuple[int, ...]:
        """The sizes of what is transferred."""
        return self.shape if self.is_usual else _sent(self.shape, self._all_strides)[0]

    def room(self, device: torch.device | None = None) -> Tensor:
        """Memory for what is transferred of a tensor of this form.

        Args:
            device: where; None: on the CPU.
        """
        device = device or _CPU
        if self.is_usual or not self._is_block():
            return torch.empty(self.sent_sizes, dtype=self.dtype, device=device)
        (size,) = self.sent_sizes
        return torch.empty(self.shift + size, dtype=self.dtype, device=device)[self.shift :]

    def tensor(self, room: Tensor) -> Tensor:
        """The tensor, after its transfer into a room.

        Example:
            >>> sent = torch.arange(6).view(2, 3)[:, ::2]
            >>> form = TensorForm.of(sent)
            >>> received = form.tensor(form.room().copy_(memory_of(sent)))
            >>> received.tolist(), received.stride()
            ([[0, 2], [3, 5]], (3, 2))
        """
        if self.is_usual:
            return room
        sizes, strides = _sent(self.shape, self._all_strides)
        if self._is_block():
            whole = room.as_strided(self.shape, self._all_strides)
        else:
            memory = room.new_empty(self.shift + extent(self.shape, self._all_strides))
            memory.as_strided(sizes, strides, self.shift).copy_(room)
            whole = memory.as_strided(self.shape, self._all_strides, self.shift)
        return whole if whole.is_inference() else whole.data  # not a view, and never changed

    def _is_block(self) -> bool:
        """Whether all memory from the first to the last element is transferred, as it is."""
        return self.is_usual or _sent(self.shape, self._all_strides)[1] == (1,)


def lies_on_accelerator(tensor: Tensor) -> bool:
    """Whether a tensor is to be on the accelerator of its receiver."""
    return not tensor.is_cpu


def memory_of(tensor: Tensor) -> Tensor:
    """What is transferred of a tensor: its elements, without gaps between them, in an order that its form knows.

    Example:
        >>> memory_of(torch.tensor([[1, 2], [3, 4]]).t()).tolist(), memory_of(torch.ones(1).expand(2, 3)).tolist()
        ([1, 2, 3, 4], [1.0])
    """
    # After `conj()`, the memory has other numbers than the tensor.
    return elements_of(tensor).resolve_conj().resolve_neg().contiguous()


def elements_of(tensor: Tensor) -> Tensor:
    """A view of a tensor that has each of its elements once, to be read or written.

    Example:
        >>> repeated = torch.zeros(1).expand(2, 3)
        >>> _ = elements_of(repeated).fill_(5.0)
        >>> repeated.tolist()
        [[5.0, 5.0, 5.0], [5.0, 5.0, 5.0]]
    """
    tensor = tensor.detach()
    if type(tensor) is not torch.Tensor:
        tensor = local_part(tensor)
    return tensor if tensor.is_contiguous() else tensor.as_strided(*_sent(tensor.shape, tensor.stride()))


def bytes_of(tensor: Tensor) -> int:
    """The size of a tensor in bytes; of a sparse one, what it would have if it were dense.

    Example:
        >>> bytes_of(torch.zeros(3)), bytes_of(torch.zeros(3).to_sparse())
        (12, 12)
    """
    return tensor.nbytes if tensor.layout is torch.strided else tensor.numel() * tensor.element_size()


def copied(tensor: Tensor, device: torch.device) -> Tensor:
    """A copy on another device, which lies there as the tensor does here.

    The host does not wait, unless the copy goes to the CPU and the tensor has gaps or an unusual place in memory.

    Example:
        >>> copied(torch.arange(6).view(2, 3)[:, ::2], torch.device("cpu")).stride()
        (3, 2)
    """
    if type(tensor) is not torch.Tensor or tensor.layout is not torch.strided:
        return tensor.to(device, non_blocking=True)
    form = TensorForm.of(tensor)
    if form.is_usual:
        return tensor.to(device, non_blocking=True)
    room = form.room(device)
    return form.tensor(room.copy_(memory_of(tensor).view(room.shape), non_blocking=device.type != "cpu"))


def usual_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """The strides of a new tensor.

    Example:
        >>> usual_strides((4, 1, 0, 3))
        (3, 3, 3, 1)
    """
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def extent(shape: Sequence[int], strides: Sequence[int]) -> int:
    """How many elements there are from the first to the last one in memory, with those of gaps."""
    return 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))


def repeats_memory(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether elements of one tensor share memory with each other, as those of windows do.

    Example:
        >>> repeats_memory((3, 2), (1, 1)), repeats_memory((2, 4), (1, 2)), repeats_memory((4, 2), (0, 1))
        (True, False, True)
    """
    reached = 0
    for stride, size in sorted(zip(strides, shape, strict=True)):
        if size > 1 and stride <= reached:
            return True
        reached += (size - 1) * stride
    return False


def _sent(shape: Sequence[int], strides: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Sizes and strides of the part of a tensor that is transferred.

    That is all memory from the first to the last element, if there are no gaps or if elements share memory; else the
    elements, each once where a dimension repeats them.

    Example:
        >>> _sent((3, 2), (1, 3)), _sent((2, 2), (6, 2)), _sent((4, 2), (0, 2)), _sent((2, 3), (1, 1))
        (((6,), (1,)), ((2, 2), (6, 2)), ((1, 2), (0, 2)), ((4,), (1,)))
    """
    if 0 in shape:
        return (0,), (1,)
    sizes = [size if stride else 1 for size, stride in zip(shape, strides, strict=True)]
    whole = extent(shape, strides)
    if repeats_memory(sizes, strides) or whole == math.prod(sizes):
        return (whole,), (1,)
    return tuple(sizes), tuple(strides)


def _shift(tensor: Tensor) -> int:
    beyond = tensor.data_ptr() % ALIGNMENT  # 0 without elements
    return beyond // tensor.element_size() if beyond else 0
