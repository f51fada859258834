"""The header of a message between processes: the forms of its tensors and the structure around them, as JSON bytes.

The sender may be broken or hostile. Decoding runs nothing and imports nothing, and malformed bytes are a ValueError.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from pipework.runtime.skips.stashed import Stashed
from pipework.torch_private import ALIGNMENT
from pipework.values import structure_json
from pipework.values.equality import same
from pipework.values.json_codec import decode_scalar, encode_scalar
from pipework.values.nested import Place, Structure

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor


_CPU = torch.device("cpu")
_UNCHANGING = {Place, type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device}


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
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    requires_grad: bool
    strides: tuple[int, ...] | None = None
    on_accelerator: bool = False
    shift: int = 0
    _all_strides: tuple[int, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        strides = _usual_strides(self.shape) if self.strides is None else self.strides
        object.__setattr__(self, "_all_strides", strides)

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
        _refuse_own_class(tensor)
        if tensor.layout is not torch.strided:
            raise TypeError(
                f"a tensor with the layout {tensor.layout} cannot be sent to another process: make it dense, "
                ".to_dense(), or keep the layers that exchange it in one partition"
            )
        usual = 0 in tensor.shape or tensor.stride() == _usual_strides(tensor.shape)
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

    def fits(self, tensor: Tensor) -> bool:
        """Whether this is the form of a tensor, without making its form."""
        return (
            type(tensor) is torch.Tensor
            and tensor.dtype is self.dtype
            and tensor.shape == self.shape
            and tensor.requires_grad is self.requires_grad
            and tensor.layout is torch.strided
            and (tensor.stride() == self._all_strides or 0 in self.shape)
            and _shift(tensor) == self.shift
            and lies_on_accelerator(tensor) is self.on_accelerator
        )

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
            memory = room.new_empty(self.shift + _extent(self.shape, self._all_strides))
            memory.as_strided(sizes, strides, self.shift).copy_(room)
            whole = memory.as_strided(self.shape, self._all_strides, self.shift)
        return whole if whole.is_inference() else whole.data  # not a view, and never changed

    def _is_block(self) -> bool:
        """Whether all memory from the first to the last element is transferred, as it is."""
        return self.is_usual or _sent(self.shape, self._all_strides)[1] == (1,)


@dataclass(frozen=True, slots=True, eq=False)
class Description:
    """A message without the values of its tensors.

    Attributes:
        forms: one for each tensor, None for a missing one.
        around: None, a number, the structure of the tensors, or a `Stashed` with that structure.
    """

    forms: tuple[TensorForm | None, ...]
    around: Any

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Description):
            return NotImplemented
        return self.forms == other.forms and same(self.around, other.around)

    __hash__ = None  # type: ignore[assignment]  # plain values may be lists

    def tensors(self, rooms: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
        """The tensors, after their transfers into rooms; None for those that have none."""
        pairs = zip(self.forms, rooms, strict=True)
        return tuple([None if form is None or room is None else form.tensor(room) for form, room in pairs])

    def fits(self, tensors: Sequence[Tensor | None], around: Any) -> bool:
        """Whether this is the description of a message, without making its description.

        Example:
            >>> description = describe((torch.zeros(2), None), None)
            >>> description.fits((torch.ones(2), None), None), description.fits((torch.ones(3), None), None)
            (True, False)
        """
        if len(tensors) != len(self.forms) or not (around is self.around or same(around, self.around)):
            return False
        for form, tensor in zip(self.forms, tensors, strict=True):
            if form is None or tensor is None:
                if not (form is None and tensor is None):
                    return False
            elif not form.fits(tensor):
                return False
        return True


def describe(tensors: Sequence[Tensor | None], around: Any) -> Description:
    """The description of a message.

    Raises:
        TypeError: a tensor is not dense, or is of a subclass of Tensor.

    Example:
        >>> form, missing = describe((torch.zeros(2, 3), None), None).forms
        >>> form.shape, missing
        ((2, 3), None)
    """
    return Description(tuple([None if tensor is None else TensorForm.of(tensor) for tensor in tensors]), around)


def may_be_changed(around: Any) -> bool:
    """Whether there are plain values that a layer can change in place, such as a dataclass without tensors.

    Example:
        >>> from pipework.values.nested import flatten
        >>> may_be_changed(flatten((torch.zeros(1), 5))[1]), may_be_changed(flatten((torch.zeros(1), {1}))[1])
        (False, True)
    """
    if isinstance(around, Stashed):
        around = around.structure
    return isinstance(around, Structure) and any(type(leaf) not in _UNCHANGING for leaf in around.leaves)


def lies_on_accelerator(tensor: Tensor) -> bool:
    """Whether a tensor is to be on the accelerator of its receiver."""
    return not tensor.is_cpu


def memory_of(tensor: Tensor) -> Tensor:
    """What is transferred of a tensor: its elements, without gaps between them, in an order that its form knows.

    Example:
        >>> memory_of(torch.tensor([[1, 2], [3, 4]]).t()).tolist(), memory_of(torch.ones(1).expand(2, 3)).tolist()
        ([1, 2, 3, 4], [1.0])
    """
    tensor = tensor.detach()
    if not tensor.is_contiguous():
        tensor = tensor.as_strided(*_sent(tensor.shape, tensor.stride()))
    # After `conj()`, the memory has other numbers than the tensor.
    return tensor.resolve_conj().resolve_neg().contiguous()


def encode(description: Description) -> bytes:
    """The description as bytes.

    Raises:
        TypeError: a value cannot be sent; the message names its type and its path.

    Example:
        >>> encode(describe((torch.zeros(2),), None))
        b'{"forms":[["torch.float32",[2],false]],"around":null}'
    """
    whole = {"forms": list(map(_encode_form, description.forms)), "around": _encode_around(description.around)}
    return json.dumps(whole, separators=(",", ":"), allow_nan=False).encode()


def decode(data: bytes) -> Description:
    """The description of what `encode` gave.

    Raises:
        ValueError: the bytes are malformed, or name a class that this process does not know.

    Example:
        >>> decode(encode(describe((torch.zeros(2),), None))) == describe((torch.zeros(2),), None)
        True
    """
    try:
        whole = json.loads(data.decode())
        match whole:
            case {"forms": [*forms], "around": around}:
                return Description(tuple(map(_decode_form, forms)), _decode_around(around, len(forms)))
        raise ValueError("it is no description")
    except Exception as error:  # hostile bytes can cause any error, such as a RecursionError
        raise ValueError(f"a message between processes cannot be read: {error}") from error


def _refuse_own_class(tensor: Tensor) -> None:
    """Refuses subclasses: only numbers are sent. A Parameter is sent as the tensor that it is after `detach()`."""
    if type(tensor) is not torch.Tensor and type(tensor.detach()) is not torch.Tensor:
        raise TypeError(
            f"a tensor of the class {type(tensor).__module__}.{type(tensor).__qualname__} cannot be sent to another "
            "process, where it would arrive as a plain tensor: return tensor.as_subclass(torch.Tensor) if only the "
            "numbers are needed, or keep the layers that exchange it in one partition"
        )


def _shift(tensor: Tensor) -> int:
    beyond = tensor.data_ptr() % ALIGNMENT  # 0 without elements
    return beyond // tensor.element_size() if beyond else 0


def _usual_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """The strides of a new tensor.

    Example:
        >>> _usual_strides((4, 1, 0, 3))
        (3, 3, 3, 1)
    """
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def _extent(shape: Sequence[int], strides: Sequence[int]) -> int:
    """How many elements there are from the first to the last one in memory, with those of gaps."""
    return 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))


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
    extent, reached = _extent(shape, strides), 0
    for stride, size in sorted((stride, size) for stride, size in zip(strides, sizes, strict=True) if size > 1):
        if stride <= reached:
            return (extent,), (1,)
        reached += (size - 1) * stride
    if extent == math.prod(sizes):
        return (extent,), (1,)
    return tuple(sizes), tuple(strides)


def _encode_form(form: TensorForm | None) -> Any:
    if form is None:
        return None
    strides = None if form.strides is None else list(form.strides)
    unusual = [strides, form.on_accelerator, form.shift]
    while unusual and not unusual[-1]:
        unusual.pop()
    return [str(form.dtype), list(form.shape), form.requires_grad, *unusual]


def _decode_form(form: Any) -> TensorForm | None:
    match form:
        case None:
            return None
        case [str(dtype), [*shape], bool(requires_grad), *rest] if _are_sizes(shape) and len(rest) <= 3:
            defaults: list[Any] = [None, False, 0]
            given, on_accelerator, shift = rest + defaults[len(rest) :]
            kind, strides = structure_json.DTYPES[dtype], _usual_strides(shape) if given is None else tuple(given)
            well_formed = _are_sizes((*strides, shift)) and len(strides) == len(shape) and shift < ALIGNMENT
            if well_formed and type(on_accelerator) is bool:
                extent = 0 if 0 in shape else shift + _extent(shape, strides)
                if max(math.prod(shape), extent, *strides) * kind.itemsize >= 2**63:
                    raise ValueError(f"a tensor of shape {shape} is too large")
                kept = None if given is None else strides
                return TensorForm(kind, tuple(shape), requires_grad, kept, on_accelerator, shift)
    raise ValueError(f"{str(form)[:80]!r} stands for no tensor")


def _are_sizes(numbers: Sequence[Any]) -> bool:
    return all(type(number) is int and number >= 0 for number in numbers)


def _encode_around(around: Any) -> Any:
    if around is None or type(around) is int:
        return encode_scalar(around)
    if isinstance(around, Stashed):
        return {"stashed": list(map(list, around.which)), "around": _encode_around(around.structure)}
    if not isinstance(around, Structure):
        raise TypeError(f"{type(around).__qualname__} stands around the tensors, not None, an int or a Structure")
    try:
        return {"structure": structure_json.encode(around)}
    except structure_json.EncodeError as error:
        where = f" at output{error.path}" if error.path else ""
        raise TypeError(
            f"{error.value} stands{where} in what is to be sent to another process. Between processes only tensors "
            f"are sent, and {structure_json.SUPPORTED}, in tuples, lists, dicts, named tuples, dataclasses and classes "
            "that are registered with torch.utils._pytree"
        ) from None


def _decode_around(form: Any, count: int) -> Any:
    match form:
        case None | int() if not isinstance(form, bool):
            return form
        case {"$": "int"}:
            return decode_scalar(form)
        case {"structure": structure}:
            return structure_json.decode(structure, count)
        case {"stashed": [*which], "around": (None | {"structure": _}) as inner}:
            pairs = [(n, skip) for n, skip in which if _are_sizes((n, skip)) and n < count]
            if len(pairs) == len(which):
                return Stashed(_decode_around(inner, count), tuple(pairs))
    raise ValueError(f"{str(form)[:80]!r} cannot stand around tensors")
