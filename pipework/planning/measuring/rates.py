"""Times of layers on devices that are not here, from the operations and bytes of copies on the meta device."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from pipework import torch_private
from pipework.torch_private import memory_key
from pipework.values import nested


@dataclass(frozen=True)
class Rates:
    """How fast a kind of device is.

    Attributes:
        operations: floating-point operations a second that large matrix products reach, in the dtype of the model.
        bytes_per_second: of its memory.
        memory: its bytes; None: unknown.
        launch: seconds that an operator takes at least.
        host_bytes_per_second: of the link between the device and its host's memory, each way, such as 25e9; None:
            unknown, and a plan offloads no activations.

    Raises:
        ValueError: one of them is no number above 0.

    Example:
        >>> Rates(operations=400e12, bytes_per_second=3e12, memory=80 * 2**30).launch
        5e-06
    """

    operations: float
    bytes_per_second: float
    memory: int | None = None
    launch: float = 5e-6
    host_bytes_per_second: float | None = None

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            may_be_none = name in ("memory", "host_bytes_per_second")
            if not (value is None and may_be_none) and not (is_number and 0 < value < float("inf")):
                raise ValueError(f"Rates: {name} is {value!r}: wanted a finite number above 0")


def checked_rates(rates: Any) -> Mapping[str, Rates]:
    """Rates by the names of kinds of device; `Rates` alone are those of "device"."""
    found = {"device": rates} if isinstance(rates, Rates) else rates
    named = isinstance(found, Mapping) and {(type(name), type(each)) for name, each in found.items()}
    if named != {(str, Rates)}:
        raise TypeError(f"rates is {rates!r}: wanted Rates by the name of each kind, such as {{'gpu': Rates(...)}}")
    return dict(found)


@contextmanager
def rated_clock(rates: Rates) -> Iterator[Callable[[], float]]:
    """A clock that goes on by what the operators that run inside would take on a device.

    Each operator either computes or moves bytes as fast as the device can, and none is faster than its launch. Views
    take no time.

    Example:
        >>> import torch
        >>> with torch.device("meta"), rated_clock(Rates(operations=1000, bytes_per_second=8)) as read:
        ...     x = torch.empty(4, 8)
        ...     begin = read()
        ...     y = x @ x.t()
        >>> read() - begin  # 320 bytes
        40.0
    """
    operations = FlopCounterMode(display=False)
    with operations, _Operators(rates, operations) as found:
        yield lambda: found.seconds


class _Operators(torch_private.DispatchMode):  # type: ignore[misc]
    """Adds up what operators would take; `operations` counts floating-point operations, below this mode."""

    def __init__(self, rates: Rates, operations: FlopCounterMode) -> None:
        super().__init__()
        self._rates, self._operations = rates, operations
        self.seconds = 0.0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Runs the operator."""
        before = self._operations.get_total_flops()
        result = func(*args, **(kwargs or {}))
        given, made = (nested.flatten(each)[0] for each in ((args, kwargs or {}), result))
        is_view = {*map(memory_key, made)} <= {*map(memory_key, given)}
        if not is_view or torch_private.changes_arguments(func):
            operations = self._operations.get_total_flops() - before
            size = sum(each.nbytes for each in (*given, *made))
            rates = self._rates
            self.seconds += max(operations / rates.operations, size / rates.bytes_per_second, rates.launch)
        return result


class MetaNumbers(torch_private.DispatchMode):  # type: ignore[misc]
    """Inside, a forward may read numbers from tensors on the meta device, as to decide how it goes on.

    Whether all of something is so is answered with yes, since the rows of a usual batch are alike, and any other number
    is zero.

    Example:
        >>> with torch.device("meta"), MetaNumbers():
        ...     x = torch.empty(2)
        ...     bool((x == 0).all()), bool((x > 0).any()), x.sum().item()
        (True, False, 0.0)
    """

    def __init__(self) -> None:
        super().__init__()
        self._of_all: Any = None  # what the last question about all elements has returned

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Runs the operator."""
        if func is torch_private.reads_number and args[0].is_meta:
            return torch.full((), args[0] is self._of_all, dtype=args[0].dtype, device="cpu").item()
        result = func(*args, **(kwargs or {}))
        if func.overloadpacket is torch.ops.aten.all:
            self._of_all = result
        return result
