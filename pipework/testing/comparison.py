"""Compares named tensors, bitwise or relative to the largest element."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Self

import torch
from torch import Tensor

from pipework import torch_private
from pipework.values.dtensor import is_dtensor, local_part

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

# Of sums in another order, relative to the largest element; by the lowest precision that anything is computed in.
_TOLERANCES: Final = {torch.float64: 1e-9, torch.float32: 1e-4}
_OF_OTHERS: Final = 5e-2
_TINY: Final = 1e-30
# Of a model that differs from itself: how many times its own difference is allowed, as two runs are a small sample,
# and what rounding makes of sums in 16 bits (two units in the last place of bfloat16), so that the least is allowed.
_TIMES: Final = 4
_LEAST_OF_OTHERS: Final = 1.6e-2
MOST: Final = 5e-2  # a model that differs more from itself gives nothing to compare with
ROUNDED: Final = "equal up to rounding"
_FLOOR: Final = 1e-3  # of the largest element of all tensors: a smaller tensor is compared relative to that


@dataclass(frozen=True)
class Compared:
    """A line of the table: tensors of one kind that were compared.

    Attributes:
        what: the kind, such as "gradients".
        against: what the tensors were compared with.
        tensors: how many.
        bitwise: whether their bits must be equal.
        difference: the largest, relative to the largest element of the tensor; infinite if shapes or NaNs differ.
        verdict: in a word or two.
        first: the name of the first tensor that differs too much; empty: none does.
    """

    what: str
    against: str
    tensors: int
    bitwise: bool
    difference: float
    verdict: str
    first: str

    @classmethod
    def of(cls, what: str, against: str, found: Mapping[str, float], most: float = 0.0, near: str = ROUNDED) -> Self:
        """The line for some differences.

        Args:
            what: see the class.
            against: likewise.
            found: the difference of each tensor, by name.
            most: the largest that is allowed; 0: bits must be equal.
            near: the verdict if something differs, but not too much.

        Example:
            >>> [Compared.of("outputs", "itself", {"x": 0.5, "y": 2.0}, most).verdict for most in (0.0, 2.0)]
            ['DIFFERS: x', 'equal up to rounding']
        """
        difference = max(found.values())
        first = next((name for name, each in found.items() if each > most), "")
        verdict = f"DIFFERS: {first}" if first else near if difference else "equal"
        if first and math.isinf(difference):
            verdict += " (in shape, dtype, NaN, or a plain value)"
        return cls(what, against, len(found), not most, difference, verdict, first)


def differences(values: Mapping[str, Any], reference: Mapping[str, Any]) -> dict[str, float]:
    """How far apart values and reference values of the same name are; see `apart`.

    Args:
        values: by name: tensors on the CPU, or plain values. A tensor that is missing, or None, equals zeros.
        reference: likewise.

    Example:
        >>> differences({"x": torch.tensor([1.0, 3.0]), "n": 3}, {"x": torch.tensor([1.0, 2.0]), "n": 3})
        {'x': 0.5, 'n': 0.0}
    """
    numbers = [each for each in reference.values() if isinstance(each, Tensor) and each.is_floating_point()]
    floor = _FLOOR * max(map(_largest, numbers), default=0.0)
    return {name: apart(values.get(name), reference.get(name), floor) for name in {**reference, **values}}


def tolerance_of(values: Iterable[Any]) -> float:
    """How far apart sums in another order may be, for what a run gave."""
    if torch_private.any_autocast():
        return _OF_OTHERS
    dtypes = {each.dtype for each in values if isinstance(each, Tensor) and each.is_floating_point()}
    return max((_TOLERANCES.get(dtype, _OF_OTHERS) for dtype in dtypes), default=0.0)


def allowed_for(itself: float, tolerance: float) -> float:
    """How far a pipe may be apart from a model that differs from itself when it is run twice.

    Args:
        itself: by how much it does, relative to the largest element; at most `MOST`.
        tolerance: of sums in another order, as `tolerance_of` gives it.

    Example:
        >>> allowed_for(3e-3, 1e-4), allowed_for(1e-6, 1e-4)
        (0.012, 0.0001)
    """
    return max(_TIMES * itself, min(tolerance, _LEAST_OF_OTHERS))


def on_host(value: Any) -> Any:
    """A copy of a tensor on the CPU, of a DTensor its part here; any other value as it is."""
    if not isinstance(value, Tensor):
        return value
    own = local_part(value.detach()) if is_dtensor(value) else value.detach()
    return (own if own.layout is torch.strided else own.to_dense()).to("cpu", copy=True)


def _largest(tensor: Tensor) -> float:
    finite = tensor[tensor.isfinite()]
    return float(finite.abs().max()) if finite.numel() else 0.0


def apart(one: Any, other: Any, floor: float = 0.0) -> float:
    """The largest difference, relative to the largest element of the other tensor, or to the floor if that is larger.

    Of what has no such number it is infinite: other shapes, dtypes or NaNs, and plain values that differ.

    Example:
        >>> apart(torch.tensor([1.0, 4.5]), torch.tensor([1.0, 4.0])), apart(1, 1), apart(1, 2)
        (0.125, 0.0, inf)
    """
    if one is None and isinstance(other, Tensor):  # a missing gradient equals zeros
        one = torch.zeros_like(other)
    if other is None and isinstance(one, Tensor):
        other = torch.zeros_like(one)
    if not (isinstance(one, Tensor) and isinstance(other, Tensor)):
        return 0.0 if type(one) is type(other) and (one == other or one != one) else math.inf
    if one.shape != other.shape or one.dtype != other.dtype:
        return math.inf
    differ = (one != other) & ~(one.isnan() & other.isnan())
    if not bool(differ.any()):
        return 0.0
    wide = torch.complex128 if one.is_complex() else torch.float64
    found = float((one[differ].to(wide) - other[differ].to(wide)).abs().max())
    return found / max(_largest(other), floor, _TINY) if math.isfinite(found) else math.inf
