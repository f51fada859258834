"""Compares named tensors, bitwise or relative to the largest element, and finds the first layer that gives others."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import math
from collections import Counter
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Self

import torch
from torch import Tensor, nn

from pipework import torch_private
from pipework.runtime.random.streams import micro_batch_here
from pipework.runtime.stage.recomputation import is_recomputing
from pipework.torch_private import pytree
from pipework.values.dtensor import is_dtensor, local_part

if TYPE_CHECKING:
    from collections.abc import Mapping

# Of sums in another order, relative to the largest element; by the lowest precision that anything is computed in.
_TOLERANCES: Final = {torch.float64: 1e-9, torch.float32: 1e-4}
_OF_OTHERS: Final = 5e-2
_TINY: Final = 1e-30
# Of a model that differs from itself: how many times its own difference is allowed, as two runs are a small sample,
# and what rounding makes of sums in 16 bits (two units in the last place of bfloat16), so that the least is allowed.
_TIMES: Final = 4
_LEAST_OF_OTHERS: Final = 1.6e-2
MOST: Final = 5e-2  # a model that differs more from itself gives nothing to compare with
_WITHIN: Final = "within what the plain model differs from itself"
_FLOOR: Final = 1e-3  # of the largest element of all tensors: a smaller tensor is compared relative to that


@dataclass(frozen=True)
class Compared:
    """A line of the table: tensors of one kind that were compared.

    Attributes:
        what: the kind, such as "gradients".
        against: what they were compared with.
        tensors: how many.
        bitwise: whether their bits must be equal.
        differing: how many differ at all.
        difference: the largest, relative to the largest element of the tensor; infinite if shapes or NaNs differ.
        first: the name of the first that differs too much; empty: none does.
        near: the verdict if something differs, but not too much.
    """

    what: str
    against: str
    tensors: int
    bitwise: bool
    differing: int = 0
    difference: float = 0.0
    first: str = ""
    near: str = "equal up to rounding"

    @property
    def verdict(self) -> str:
        """In a word or two."""
        if self.first and math.isinf(self.difference):
            return f"DIFFERS: {self.first} (in shape, dtype, NaN, or a plain value)"
        return f"DIFFERS: {self.first}" if self.first else self.near if self.differing else "equal"

    def joined(self, other: Self) -> Self:
        """This line with what another process compared."""
        return replace(
            self,
            tensors=self.tensors + other.tensors,
            differing=self.differing + other.differing,
            difference=max(self.difference, other.difference),
            first=self.first or other.first,
            near=self.near if self.difference >= other.difference else other.near,
        )


def compare(
    against: str,
    values: Mapping[str, Mapping[str, Any]],
    reference: Mapping[str, Mapping[str, Any]],
    tolerances: Mapping[str, float],
    allowed: Mapping[str, float] = MappingProxyType({}),
    suffix: str = "",
) -> list[Compared]:
    """Compares values with those of the same kind and name, and returns a line for each kind that has values.

    Args:
        against: see `Compared`.
        values: by kind and name: tensors on the CPU, or plain values. A tensor that is missing, or None, equals zeros.
        reference: likewise.
        tolerances: by kind, of the relative difference by rounding; none: bitwise.
        allowed: by kind, of the relative difference where the reference differs from itself.
        suffix: of the kinds, in the table.

    Example:
        >>> one, other = {"outputs": {"x": torch.ones(2)}}, {"outputs": {"x": torch.tensor([1.0, 2.0])}}
        >>> [compare("itself", other, one, {"outputs": most})[0].verdict for most in (0.0, 2.0)]
        ['DIFFERS: x', 'equal up to rounding']
        >>> compare("itself", other, one, {}, {"outputs": 2.0})[0].verdict
        'within what the plain model differs from itself'
    """
    lines = []
    for kind, own in values.items():
        others, tolerance = reference[kind], tolerances.get(kind, 0.0)
        most = max(tolerance, allowed.get(kind, 0.0))
        numbers = [each for each in others.values() if isinstance(each, Tensor) and each.is_floating_point()]
        floor = _FLOOR * max(map(_largest, numbers), default=0.0)
        found = {name: apart(own.get(name), others.get(name), floor) for name in {**others, **own}}
        if found:
            difference = max(found.values())
            line = Compared(kind + suffix, against, len(found), not most, sum(map(bool, found.values())), difference)
            first = next((name for name, each in found.items() if each > most), "")
            near = _WITHIN if kind in allowed and difference > tolerance else line.near
            lines.append(replace(line, first=first, near=near))
    return lines


def tolerance_of(values: Mapping[str, Mapping[str, Any]]) -> float:
    """How far apart sums in another order may be, for what a run gave."""
    found = {each.dtype for own in values.values() for each in own.values() if isinstance(each, Tensor)}
    found = {dtype for dtype in found if dtype.is_floating_point}
    if torch_private.any_autocast():
        return _OF_OTHERS
    return max((_TOLERANCES.get(dtype, _OF_OTHERS) for dtype in found), default=0.0)


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


class LayerPlace(NamedTuple):
    """Where a difference was found; the smallest one is the first.

    Attributes:
        is_gradient: whether in what came back to a layer, and not in what it gave.
        micro_batch: its number.
        order: of the layers' calls, for gradients from behind.
        layer: its name and class.
    """

    is_gradient: bool
    micro_batch: int
    order: int
    layer: str

    def __str__(self) -> str:
        what = "the gradient of its output" if self.is_gradient else "its output"
        return f"micro-batch {self.micro_batch}, layer {self.layer}: {what}"


class LayerTrace:
    """Hooks on layers note what they give, and the gradient of that.

    It holds for each tensor 16 bytes, and two numbers for each of its rows.
    """

    def __init__(self) -> None:
        self.seen: dict[tuple[bool, int, str, int], tuple[bytes, Tensor]] = {}
        self._counts: dict[tuple[bool, int, str], int] = {}

    def watch(self, layers: Mapping[str, nn.Module]) -> None:
        """Adds the hooks, which the caller removes.

        Args:
            layers: by name.
        """
        for name, layer in {id(layer): (name, layer) for name, layer in layers.items()}.values():
            layer.register_forward_hook(functools.partial(self._gave, name))

    def _gave(self, name: str, layer: nn.Module, inputs: Any, output: Any) -> None:
        micro_batch = micro_batch_here()
        named = f"{name!r} ({type(layer).__name__})"
        for tensor in pytree.tree_leaves(output):
            if not isinstance(tensor, Tensor):
                continue
            if not is_recomputing():
                self._note(False, micro_batch, named, tensor)
            if tensor.requires_grad:
                noted = functools.partial(self._note, True, micro_batch, named)
                tensor.register_hook(noted)  # type: ignore[no-untyped-call]

    def _note(self, is_gradient: bool, micro_batch: int, layer: str, tensor: Tensor) -> None:
        place = is_gradient, micro_batch, layer
        number = self._counts[place] = self._counts.get(place, -1) + 1
        self.seen[(*place, number)] = _digest(tensor), _sums(tensor)

    def first_difference(
        self, reference: LayerTrace, tolerances: tuple[float, float], *, whole: bool
    ) -> LayerPlace | None:
        """The first place where layers gave something else.

        Args:
            reference: of the same micro-batches; or of one with all their rows, whose gradients are not compared.
            tolerances: of outputs and of gradients, relative to the largest sum of a row; 0: other bits count.
            whole: whether the reference has all rows in one micro-batch.
        """
        calls, begins, found = Counter[tuple[bool, int]](), Counter[tuple[str, int]](), []
        for key in self.seen if whole else reference.seen:
            is_gradient, micro_batch, layer, number = key
            calls[is_gradient, micro_batch] += 1
            own, other = self.seen.get(key), reference.seen.get((is_gradient, 0, layer, number) if whole else key)
            if whole and (is_gradient or other is None):
                continue
            equal = own is not None and other is not None and own[0] == other[0]
            if own is not None and other is not None and not equal and (whole or tolerances[is_gradient]):
                bound, rows, sums = tolerances[is_gradient] * _largest(other[1]), len(own[1]), other[1]
                if whole and rows < len(sums):  # cut along the rows
                    sums = sums[begins[layer, number] :][:rows]
                    begins[layer, number] += rows
                equal = sums.shape == own[1].shape and bool(((own[1] - sums).abs() <= bound).all())
            if not equal:
                found.append(LayerPlace(is_gradient, micro_batch, calls[is_gradient, micro_batch], layer))
        return min(found, default=None)


def _digest(tensor: Tensor) -> bytes:
    plain = tensor.detach().to_dense() if tensor.layout is not torch.strided else tensor.detach()
    there = plain.cpu().contiguous()
    data = ctypes.string_at(there.data_ptr(), there.nbytes) if there.nbytes else b""  # without numpy
    return hashlib.blake2b(data, digest_size=16).digest()


def _sums(tensor: Tensor) -> Tensor:
    """The sum of each row, and that of its absolute values."""
    if not tensor.dim() or tensor.is_complex() or tensor.layout is not torch.strided:
        return torch.zeros(0, 2)
    rows = tensor.detach().cpu().double().reshape(len(tensor), -1)
    return torch.stack([rows.sum(1), rows.abs().sum(1)], 1)
