"""Warns early about a rank whose layers have no parameters, which PyTorch's optimizers and GradScaler refuse."""

from __future__ import annotations

import itertools
import logging
from typing import TYPE_CHECKING, Any

from pipework.schedule.placement import named_stages

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import nn

_LOG = logging.getLogger("pipework")


def check_parameters(
    partitions: Sequence[nn.Sequential], placement: Sequence[int], ranks: Sequence[int], worker: int, grad_scaler: Any
) -> None:
    """Warns on a rank without parameters, where a usual script would fail. A model without any gets no warning."""
    having = {
        place for place, part in zip(placement, partitions, strict=True) if next(part.parameters(), None) is not None
    }
    if not having or worker in having:
        return
    scales = grad_scaler is not None and getattr(grad_scaler, "is_enabled", lambda: True)()
    balance = _balance_with_parameters(partitions)
    _LOG.warning(
        "no parameters are in the layers of %s, and PyTorch's optimizers refuse an empty list: %s, or give them a "
        'group, which may be empty: [{"params": list(pipe.parameters())}]%s',
        _named(partitions, placement, worker, ranks[worker]),
        f"choose another balance=, such as {balance}" if balance else "start fewer processes",
        "; and leave out scaler.step(optimizer) on this rank, but not scaler.update()" if scales else "",
    )


def _balance_with_parameters(partitions: Sequence[nn.Sequential]) -> list[int] | None:
    """A balance in which every partition has parameters; None: there is none.

    Example:
        >>> from torch import nn
        >>> _balance_with_parameters([nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1)), nn.Sequential(nn.ReLU())])
        [1, 2]
    """
    layers = [layer for partition in partitions for layer in partition.children()]
    having = [n for n, layer in enumerate(layers) if next(layer.parameters(), None) is not None]
    count = len(partitions)
    if len(having) < count:
        return None
    starts = [0, *(having[part * len(having) // count] for part in range(1, count)), len(layers)]
    return [end - begin for begin, end in itertools.pairwise(starts)]


def _named(partitions: Sequence[nn.Sequential], placement: Sequence[int], worker: int, rank: int) -> str:
    """A rank and its layers, for messages."""
    here = [stage for stage, place in enumerate(placement) if place == worker]
    layers = [
        f"{name!r} {type(layer).__name__}" for stage in here for name, layer in partitions[stage].named_children()
    ]
    some = layers if len(layers) < 5 else [*layers[:3], "..."]
    return f"rank {rank} ({named_stages(placement, worker)}: {', '.join(some)})"
