"""What each layer gave and got back for each micro-batch: digests, and sums of rows, in place of the tensors."""

from __future__ import annotations

import ctypes
import functools
import hashlib
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from pipework.runtime.random.streams import micro_batch_here
from pipework.runtime.stage.recomputation import is_recomputing
from pipework.torch_private import pytree

if TYPE_CHECKING:
    from collections.abc import Mapping


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

    def first_other(self, reference: LayerTrace, tolerances: tuple[float, float]) -> LayerPlace | None:
        """The first place where the same micro-batches gave something else.

        Args:
            reference: of the same micro-batches.
            tolerances: of outputs and of gradients, relative to the largest sum of a row; 0: other bits count.
        """
        order: dict[tuple[bool, int], int] = {}
        found = []
        for (is_gradient, micro_batch, layer, number), (digest, sums) in reference.seen.items():
            at = order[is_gradient, micro_batch] = order.get((is_gradient, micro_batch), -1) + 1
            own = self.seen.get((is_gradient, micro_batch, layer, number))
            tolerance = tolerances[is_gradient]
            near = tolerance and own is not None and _near(own[1], sums, _bound(sums, tolerance))
            if own is None or (own[0] != digest and not near):
                found.append(LayerPlace(is_gradient, micro_batch, at, layer))
        return min(found, default=None)

    def first_apart(self, whole: LayerTrace, tolerance: float) -> LayerPlace | None:
        """The first layer whose rows in micro-batches are not those of the whole batch; of these the first micro-batch.

        Args:
            whole: of one micro-batch with all rows.
            tolerance: relative to the largest sum of a row.
        """
        for at, ((is_gradient, _, layer, number), (_, sums)) in enumerate(whole.seen.items()):
            bound, begin = _bound(sums, tolerance), 0
            parts = {key[1]: own for key, (_, own) in self.seen.items() if key[2:] == (layer, number) and not key[0]}
            is_whole = len(parts) > 1 and all(len(own) == len(sums) for own in parts.values())  # not cut along rows
            for micro_batch, own in sorted(parts.items()) if not is_gradient else ():
                rows = sums if is_whole else sums[begin : begin + len(own)]
                begin += len(own)
                if not _near(own, rows, bound):
                    return LayerPlace(False, micro_batch, at, layer)
        return None


def _bound(sums: Tensor, tolerance: float) -> float:
    return tolerance * float(sums.abs().max()) if sums.numel() else 0.0


def _near(sums: Tensor, reference: Tensor, bound: float) -> bool:
    return sums.shape == reference.shape and bool(((sums - reference).abs() <= bound).all())


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
