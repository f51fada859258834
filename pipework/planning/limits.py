"""Refusals before a search: limits of memory that no plan can meet."""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING

from pipework.schedule.draw.units import memory_text

if TYPE_CHECKING:
    from pipework.planning.request import PlanRequest


def refuse_impossible(request: PlanRequest) -> None:
    """Refuse limits that are too small for what every plan holds: all weights, and each layer on some device.

    Raises:
        ValueError: more devices than layers, a layer is larger than any device, or all layers together are larger than
            all devices.
    """
    layers = request.profile.layers
    if len(request.devices) > len(layers):
        raise ValueError(
            f"there are {len(request.devices)} devices and {len(layers)} layers: each worker needs a layer, so give at "
            f"most {len(layers)} devices, or cut layers finer"
        )
    sums = request.sums(max(request.chunks))
    room = max(request.limits)
    for number, (layer, fixed, held) in enumerate(zip(layers, sums.fixed, sums.layer_least_bytes(), strict=True)):
        if fixed + held > room:
            raise ValueError(
                f"layer {number} ({layer.type} {layer.name!r}) needs {memory_text(fixed + held, 'bytes')} (weights, "
                f"gradients and optimizer {memory_text(fixed, 'bytes')}, one micro-batch "
                f"{memory_text(held, 'bytes')}), and the largest limit is {memory_text(room, 'bytes')}: cut the layer "
                "finer, raise the limit, or make micro-batches smaller"
            )
    needed, there = sum(sums.fixed), sum(request.limits)
    if there < inf and needed > there:
        raise ValueError(
            f"weights, gradients and optimizer need {memory_text(needed, 'bytes')}, and all devices together may hold "
            f"{memory_text(there, 'bytes')}: the smallest limit that could do is "
            f"{memory_text(needed / len(request.devices), 'bytes')} for each of {len(request.devices)} devices"
        )
