"""The header of a message between processes: the forms of its tensors and the structure around them, as JSON bytes.

The sender may be broken or hostile. Decoding runs nothing and imports nothing, and malformed bytes are a ValueError.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from pipework.runtime.skips.stashed import Stashed
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

    Attributes:
        dtype: of its elements.
        shape: its sizes.
        requires_grad: whether gradients are to be sent back.
        strides: of a dense tensor that is not contiguous; None: contiguous.
        on_accelerator: whether it is on the sender's accelerator, and is to be on the receiver's.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    requires_grad: bool
    strides: tuple[int, ...] | None = None
    on_accelerator: bool = False

    @classmethod
    def of(cls, tensor: Tensor) -> TensorForm:
        """The form of a tensor.

        Raises:
            TypeError: the tensor is not dense, or is of a subclass of Tensor.

        Example:
            >>> TensorForm.of(torch.zeros(2, 3).t())
            TensorForm(dtype=torch.float32, shape=(3, 2), requires_grad=False, strides=(1, 3), on_accelerator=False)
        """
        _refuse_own_class(tensor)
        strides = _unusual_strides(tensor)
        return cls(tensor.dtype, tuple(tensor.shape), tensor.requires_grad, strides, lies_on_accelerator(tensor))

    def fits(self, tensor: Tensor) -> bool:
        """Whether this is the form of a tensor, without making its form."""
        return (
            type(tensor) is torch.Tensor
            and tensor.dtype is self.dtype
            and tensor.shape == self.shape
            and tensor.requires_grad is self.requires_grad
            and _unusual_strides(tensor) == self.strides
            and lies_on_accelerator(tensor) is self.on_accelerator
        )

    def room(self, device: torch.device | None = None) -> Tensor:
        """Memory for a tensor of this form, on the CPU unless a device is given.

        Example:
            >>> TensorForm(torch.int8, (3, 2), False, (1, 3)).room().stride()
            (1, 3)
        """
        device = device or _CPU
        if self.strides is None:
            return torch.empty(self.shape, dtype=self.dtype, device=device)
        return torch.empty_strided(self.shape, self.strides, dtype=self.dtype, device=device)


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
        >>> describe((torch.zeros(2, 3), None), None).forms
        (TensorForm(dtype=torch.float32, shape=(2, 3), requires_grad=False, strides=None, on_accelerator=False), None)
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
    """The elements of a tensor in the order of the memory of its form, as they are transferred.

    Example:
        >>> memory_of(torch.tensor([[1, 2], [3, 4]]).t()).tolist()
        [1, 2, 3, 4]
    """
    # After `conj()`, the memory has other numbers than the tensor.
    tensor = tensor.detach().resolve_conj().resolve_neg()
    if tensor.is_contiguous():
        return tensor
    if _is_dense(tensor.shape, tensor.stride()):
        return tensor.as_strided((tensor.numel(),), (1,))
    return tensor.contiguous()


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


def _unusual_strides(tensor: Tensor) -> tuple[int, ...] | None:
    if tensor.layout is not torch.strided:
        raise TypeError(
            f"a tensor with the layout {tensor.layout} cannot be sent to another process: make it dense, .to_dense(), "
            "or keep the layers that exchange it in one partition"
        )
    if tensor.is_contiguous() or not _is_dense(tensor.shape, tensor.stride()):
        return None
    return tensor.stride()


def _is_dense(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether the elements fill their memory without gaps and overlaps, in any order."""
    step = 1
    for stride, size in sorted((stride, size) for stride, size in zip(strides, shape, strict=True) if size != 1):
        if stride != step:
            return False
        step *= size
    return step > 0


def _encode_form(form: TensorForm | None) -> Any:
    if form is None:
        return None
    strides = None if form.strides is None else list(form.strides)
    unusual = [strides, True] if form.on_accelerator else [] if strides is None else [strides]
    return [str(form.dtype), list(form.shape), form.requires_grad, *unusual]


def _decode_form(form: Any) -> TensorForm | None:
    match form:
        case None:
            return None
        case [str(dtype), [*shape], bool(requires_grad), *rest] if _are_sizes(shape):
            if math.prod(shape) * structure_json.DTYPES[dtype].itemsize >= 2**63:
                raise ValueError(f"a tensor of shape {shape} is too large")
            on_accelerator = len(rest) == 2 and rest[1] is True
            match rest[:1] if on_accelerator else rest:
                case [] | [None]:
                    return TensorForm(structure_json.DTYPES[dtype], tuple(shape), requires_grad, None, on_accelerator)
                case [[*strides]] if _are_sizes(strides) and _is_dense(shape, strides) and max(strides) < 2**63:
                    return TensorForm(
                        structure_json.DTYPES[dtype], tuple(shape), requires_grad, tuple(strides), on_accelerator
                    )
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
