"""Packets: memory for a message that is sent in one piece, four numbers and behind them small tensors.

For some kilobytes another transfer costs more than a copy. Packets are reused, so the tensors in them are copied out:
every tensor that is received has memory of its own.
"""

from __future__ import annotations

import ctypes
import math
from typing import TYPE_CHECKING

import torch

from pipework.values.tensor_form import memory_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from pipework.values.tensor_form import TensorForm

NUMBERS = 4
_ALIGNMENT = 16  # bytes, as much as the largest element of a tensor needs
_SMALL = 2**16  # bytes of tensors, up to which they are copied into a packet
_WHOLE_NUMBERS = frozenset(
    {torch.bool, torch.uint8, torch.int8}
    | {torch.int16, torch.int32, torch.int64}
    | {torch.uint16, torch.uint32, torch.uint64}
)


class Packet:
    """Four numbers and tensors of known forms in one piece of memory.

    Args:
        forms: of the tensors; None for a missing one.

    Attributes:
        memory: that is transferred.
        numbers: at the beginning of the memory, as an array that can be read and written.

    Example:
        >>> from pipework.values.tensor_form import TensorForm
        >>> packet = Packet([TensorForm(torch.float32, (2,), False), None])
        >>> packet.put([torch.ones(2), None])
        >>> packet.tensors()
        (tensor([1., 1.]), None)
    """

    __slots__ = ("_forms", "_views", "memory", "numbers")

    def __init__(self, forms: Sequence[TensorForm | None]) -> None:
        self._forms = tuple(forms)
        starts, end = [], 8 * NUMBERS
        for form in forms:
            starts.append(end)
            end += 0 if form is None else -(-_size(form) // _ALIGNMENT) * _ALIGNMENT
        with torch.inference_mode(False):  # else it could be used in inference mode only
            self.memory = torch.empty(end, dtype=torch.uint8, device="cpu")
            self.numbers = (ctypes.c_int64 * NUMBERS).from_address(self.memory.data_ptr())
            self._views = tuple(
                [
                    None if form is None else _view(self.memory[start : start + _size(form)], form)
                    for form, start in zip(forms, starts, strict=True)
                ]
            )

    def put(self, tensors: Sequence[Tensor | None]) -> None:
        """Copies tensors of these forms into the packet."""
        for view, tensor in zip(self._views, tensors, strict=True):
            if view is not None and tensor is not None:
                memory = memory_of(tensor)
                view.copy_(memory if memory.shape == view.shape else memory.view(view.shape))

    def tensors(self) -> tuple[Tensor | None, ...]:
        """Copies of the tensors in the packet."""
        pairs = zip(self._forms, self._views, strict=True)
        return tuple([None if form is None or view is None else _copied(form, view) for form, view in pairs])


class Packets:
    """Packets of the same forms, as many as are in use at the same time."""

    __slots__ = ("__weakref__", "_forms", "_unused")

    def __init__(self, forms: Sequence[TensorForm | None]) -> None:
        self._forms = forms
        self._unused: list[Packet] = []

    def get(self) -> Packet:
        """A packet that is not in use."""
        return self._unused.pop() if self._unused else Packet(self._forms)

    def give_back(self, packet: Packet) -> None:
        """The content of the packet is not needed any longer."""
        self._unused.append(packet)


def fits_in_packet(forms: Sequence[TensorForm | None]) -> bool:
    """Whether tensors of these forms are small, on the CPU, and of types that PyTorch can copy from plain bytes."""
    present = [form for form in forms if form is not None]
    if any(form.on_accelerator for form in present):
        return False
    return sum(map(_size, present)) <= _SMALL and all(_is_usual(form.dtype) for form in present)


def _is_usual(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point or dtype.is_complex or dtype in _WHOLE_NUMBERS


def _copied(form: TensorForm, view: Tensor) -> Tensor:
    return view.clone() if form.is_usual else form.tensor(form.room().copy_(view))


def _view(memory: Tensor, form: TensorForm) -> Tensor:
    return memory.view(form.dtype).view(form.sent_sizes)


def _size(form: TensorForm) -> int:
    return math.prod(form.sent_sizes) * form.dtype.itemsize
