"""Measures how fast values go from one kind of device to another."""

from __future__ import annotations

from itertools import combinations
from statistics import median
from typing import TYPE_CHECKING

import torch

from pipework.planning.layer_costs import LinkSpeed
from pipework.planning.measuring.stage_copy import now
from pipework.runtime.device import is_accelerator

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_SMALL, _LARGE = 4096, 64 * 2**20
_TIMES = 7
# Between two threads nothing is copied, and the receiver has to wake up.
_HAND_OVER = LinkSpeed(latency=2e-5, bytes_per_second=1e15)


def device_kind(place: torch.device) -> str:
    """The kind of a device, on which a layer's time depends: the model of an accelerator, or its type."""
    if place.type in ("cpu", "meta"):
        return place.type
    model = getattr(torch.get_device_module(place), "get_device_name", None)
    return str(model(place)) if model else place.type


def measure_links(places: Sequence[torch.device], report: Callable[[str], None]) -> dict[tuple[str, str], LinkSpeed]:
    """The links between kinds of device, in both directions alike.

    Two devices of a kind stand for all of that kind. With a single one, that several workers share, nothing is copied.
    What a copy to another device of its kind would take is unknown then.

    Args:
        places: the device of each worker.
        report: called with a line for each link.

    Example:
        >>> [ends for ends in measure_links([torch.device("cpu")] * 2, lambda line: None)]
        [('cpu', 'cpu')]
    """
    found: dict[tuple[str, str], LinkSpeed] = {}
    pairs = [*combinations(places, 2), *((place, place) for place in places if place.type == "cpu")]
    # Two different devices before one that stands there twice.
    for sender, receiver in sorted(pairs, key=lambda pair: pair[0] == pair[1]):
        ends = device_kind(sender), device_kind(receiver)
        if ends in found or ends[::-1] in found:
            continue
        copied = sender != receiver and not {sender.type, receiver.type} <= {"cpu", "meta"}
        found[ends] = speed = _copy(sender, receiver) if copied else _HAND_OVER
        report(f"{ends[0]} to {ends[1]}: {speed.latency:.2g} s and {speed.bytes_per_second:.2g} bytes a second")
    return found


def measure_host_link(device: torch.device) -> LinkSpeed:
    """The link between a device and pinned memory of its host, in the slower direction; of the CPU, a copy's speed.

    Nothing is copied from or to the meta device, so that its copies take no time.

    Example:
        >>> measure_host_link(torch.device("cpu")).bytes_per_second > 0
        True
    """
    if device.type == "meta":
        return _HAND_OVER
    host = torch.device("cpu")
    ways = {(device, host), (host, device)}
    large = _LARGE if is_accelerator(device) else _LARGE // 8
    found = [_copy(*way, large, is_pinned=is_accelerator(device)) for way in ways]
    return min(found, key=lambda speed: speed.bytes_per_second)


def _copy(
    sender: torch.device, receiver: torch.device, large: int = _LARGE, *, is_pinned: bool | None = None
) -> LinkSpeed:
    """Two sizes, from which latency and speed follow.

    Args:
        sender: has the values.
        receiver: gets them.
        large: the bytes of the larger one.
        is_pinned: whether memory of the host is pinned, where both places are allocated before; None: a new tensor is
            made by each copy.
    """
    seconds = []
    for size in (_SMALL, large):
        source, target = (
            torch.zeros(size, dtype=torch.uint8, device=place, pin_memory=bool(is_pinned) and place.type == "cpu")
            for place in (sender, receiver)
        )
        times = []
        for _ in range(_TIMES):
            now(sender)
            start = now(receiver)
            source.to(receiver, copy=True) if is_pinned is None else target.copy_(source)
            times.append(now(receiver) - start)
        seconds.append(median(times))
    return LinkSpeed(seconds[0], (large - _SMALL) / max(seconds[1] - seconds[0], 1e-9))
