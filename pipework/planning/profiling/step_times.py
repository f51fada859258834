"""The times of costs, apart from their bytes."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pipework.schedule import Costs

_TIMES = ("forward", "backward", "recompute", "input_gradient", "weight_gradient", "transfer", "skip_transfer")


def with_times(bytes_of: Costs, times: Costs) -> Costs:
    """The bytes of some costs with the seconds of others."""
    return replace(bytes_of, **{name: getattr(times, name) for name in _TIMES})


def times_scaled(costs: Costs, factor: float) -> Costs:
    """Costs whose actions take so many times as long.

    Example:
        >>> from pipework.schedule import Costs
        >>> times_scaled(Costs(forward=[1, 2], backward=2), 1.5).forward
        (1.5, 3.0)
    """
    return replace(costs, **{name: _scaled(getattr(costs, name), factor) for name in _TIMES})


def _scaled(value: float | tuple[float, ...] | None, factor: float) -> Any:
    if isinstance(value, tuple):
        return tuple(each * factor for each in value)
    return None if value is None else value * factor
