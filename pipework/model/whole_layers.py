"""A layer on the meta device whose parameters are DTensors, while it is initialised: it has whole parameters.

What a module's `reset_parameters()` draws must not depend on the mesh. So it fills whole parameters, layer by layer,
and each process keeps its part. No process ever holds more than one whole layer.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils import swap_tensors

from pipework.values.dtensor import is_dtensor, local_region, with_local_part

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextlib.contextmanager
def whole_parameters(layer: nn.Module, device: torch.device) -> Iterator[None]:
    """Inside, plain parameters on the meta device are in the place of DTensors there.

    Afterwards the DTensors are in their places again, the same objects. Those whose whole parameter has got memory have
    their part of it, on a device.

    Args:
        layer: whose.
        device: of the process.
    """
    wholes: dict[int, tuple[Tensor, nn.Parameter]] = {}
    places: list[tuple[dict[str, Any], str, Tensor]] = []
    for module in layer.modules():
        for name, tensor in module._parameters.items():
            if tensor is not None and tensor.is_meta and is_dtensor(tensor):
                empty = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
                wholes.setdefault(id(tensor), (tensor, nn.Parameter(empty, tensor.requires_grad)))
                places.append((module._parameters, name, tensor))
    for registry, name, sharded in places:
        registry[name] = wholes[id(sharded)][1]
    try:
        yield
    finally:
        for registry, name, sharded in places:
            registry[name] = sharded
    for sharded, whole in wholes.values():
        if not whole.is_meta and is_dtensor(sharded):
            offsets, sizes = local_region("it", sharded)
            part = whole.detach()[tuple(slice(start, start + size) for start, size in zip(offsets, sizes, strict=True))]
            filled = with_local_part(part.to(device, copy=True, memory_format=torch.contiguous_format), sharded)
            swap_tensors(sharded, nn.Parameter(filled, sharded.requires_grad))  # type: ignore[no-untyped-call]
