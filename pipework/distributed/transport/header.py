"""The header of a message between processes: the forms of its tensors and the structure around them, as JSON bytes.

Each message begins with three numbers, see `channel`; a header follows them only if it has changed.

Decoding runs nothing and imports nothing, and malformed bytes are a ValueError.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from pipework.runtime.skips.stashed import Stashed
from pipework.values import structure_json
from pipework.values.dtensor import DTensorPlacement
from pipework.values.json_codec import decode_scalar, encode_scalar
from pipework.values.nested import Place, Structure, same
from pipework.values.shared_memory import SharedPart
from pipework.values.tensor_form import TensorForm

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from pipework.values.shared_memory import SharedParts

_UNCHANGING = {Place, type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device}


@dataclass(frozen=True, slots=True, eq=False)
class Header:
    """A message without the values of its tensors.

    Attributes:
        forms: one for each tensor, None for a missing one.
        around: None, a number, the structure of the tensors, or a `Stashed` with that structure.
        parts: see `together`.
    """

    forms: tuple[TensorForm | None, ...]
    around: Any
    parts: SharedParts = ()

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Header):
            return NotImplemented
        return self.forms == other.forms and self.parts == other.parts and same(self.around, other.around)

    __hash__ = None  # type: ignore[assignment]  # plain values may be lists

    def tensors(self, rooms: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
        """The tensors, after their transfers into rooms; None for those that have none."""
        pairs = zip(self.forms, rooms, strict=True)
        return tuple([None if form is None or room is None else form.tensor(room) for form, room in pairs])


def describe(tensors: Sequence[Tensor | None], around: Any, parts: SharedParts = ()) -> Header:
    """The header of a message, whose tensors are those that are carried.

    Raises:
        TypeError: a tensor is not dense, or is of a subclass of Tensor.

    Example:
        >>> form, missing = describe((torch.zeros(2, 3), None), None).forms
        >>> form.shape, missing
        ((2, 3), None)
    """
    return Header(tuple([None if tensor is None else TensorForm.of(tensor) for tensor in tensors]), around, parts)


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


def encode(header: Header) -> bytes:
    """The header as bytes.

    Raises:
        TypeError: a value cannot be sent; the message names its type and its path.

    Example:
        >>> encode(describe((torch.zeros(2),), None))
        b'{"forms":[["torch.float32",[2],false,null,false,0,null]],"around":null,"parts":[]}'
    """
    forms, around = list(map(_encode_form, header.forms)), _encode_around(header.around)
    parts = [each and [each.number, str(each.dtype), *each[2:]] for each in header.parts]
    whole = {"forms": forms, "around": around, "parts": parts}
    return json.dumps(whole, separators=(",", ":"), allow_nan=False).encode()


def decode(data: bytes) -> Header:
    """The header that `encode` got.

    Raises:
        ValueError: the bytes are malformed, or name a class that this process does not know.

    Example:
        >>> decode(encode(describe((torch.zeros(2),), None))) == describe((torch.zeros(2),), None)
        True
    """
    try:
        whole = json.loads(data.decode())
        match whole:
            case {"forms": [*forms], "around": around, "parts": [*parts]}:
                decoded = tuple(map(_decode_form, forms)), _decode_around(around, len(forms))
                return Header(*decoded, tuple([None if each is None else _decode_part(*each) for each in parts]))
        raise ValueError("it is no header")
    except Exception as error:  # of any kind, such as a RecursionError
        raise ValueError(f"a message between processes cannot be read: {error}") from error


def _encode_form(form: TensorForm | None) -> Any:
    if form is None:
        return None
    placed = form.placed and [form.placed.dimensions, form.placed.places, form.placed.shape, form.placed.strides]
    memory = [form.strides, form.on_accelerator, form.shift]
    return [str(form.dtype), form.shape, form.requires_grad, *memory, placed]


def _decode_form(form: Any) -> TensorForm | None:
    if form is None:
        return None
    dtype, shape, requires_grad, strides, on_accelerator, shift, placed = form
    if placed is not None:
        dimensions, places, *sizes = placed
        placed = DTensorPlacement(tuple(dimensions), tuple(map(tuple, places)), *map(tuple, sizes))
    own = None if strides is None else tuple(strides)
    return TensorForm(structure_json.DTYPES[dtype], tuple(shape), requires_grad, own, on_accelerator, shift, placed)


def _decode_part(number: int, dtype: str, shape: list[int], strides: list[int], *rest: Any) -> SharedPart:
    return SharedPart(number, structure_json.DTYPES[dtype], tuple(shape), tuple(strides), *rest)


def _encode_around(around: Any) -> Any:
    if around is None or type(around) is int:
        return encode_scalar(around)
    if isinstance(around, Stashed):
        which, same = (list(map(list, pairs)) for pairs in (around.which, around.same))
        return {"stashed": which, "same": same, "around": _encode_around(around.structure)}
    if not isinstance(around, Structure):
        raise TypeError(f"{type(around).__qualname__} stands around the tensors, not None, an int or a Structure")
    return {"structure": structure_json.encode(around)}


def _decode_around(form: Any, count: int) -> Any:
    match form:
        case None | int() if not isinstance(form, bool):
            return form
        case {"$": "int"}:
            return decode_scalar(form)
        case {"structure": structure}:
            return structure_json.decode(structure, count)
        case {"stashed": [*which], "same": [*same], "around": (None | {"structure": _}) as inner}:
            return Stashed(_decode_around(inner, count), tuple(map(tuple, which)), tuple(map(tuple, same)))
    raise ValueError(f"{str(form)[:80]!r} cannot stand around tensors")
