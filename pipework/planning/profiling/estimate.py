"""Estimates the times of layers from their operations and bytes, for devices that are not here."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from pipework import torch_private
from pipework.planning.prediction.meta_copy import meta_copy
from pipework.planning.prediction.predict import measure_stages
from pipework.planning.prediction.stage_copy import StageCopy
from pipework.planning.profiles.layer_costs import DeviceKind, LayerSeconds
from pipework.planning.profiling.layers import alone, ignored, profile_of
from pipework.values import nested

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from pipework.planning.prediction.stage_copy import Measured
    from pipework.planning.profiles.profile import Profile
    from pipework.planning.profiling.micro_batches import SampleBatch


def estimated(
    module: nn.Sequential,
    batch: SampleBatch,
    rows: tuple[int, ...],
    rates: Mapping[str, Rates] | Rates,
    report: Callable[[str], None],
) -> Profile:
    """The profile of a module on devices that are not here.

    Args:
        module: the layers, on any device; they are run as copies on the meta device.
        batch: the mini-batch.
        rows: sizes of micro-batches.
        rates: of each kind of device, or of the only one.
        report: called with a line of text for each size.

    Raises:
        TypeError: it is something else than rates.
        ValueError: there are no rates.
    """
    rates = _by_kind(rates)
    if not rates:
        raise ValueError("rates is empty: give each kind of device a name and Rates")
    meta = torch.device("meta")
    twin = meta_copy(module, [module])
    loss = batch.loss.function
    twins = batch
    if isinstance(loss, nn.Module):
        twins = replace(batch, loss=replace(batch.loss, function=meta_copy(loss, [loss])))
    measured: list[list[Measured]] = []
    works: list[list[_Works]] = []  # which are the same for all kinds
    for size in rows:
        report(f"{len(module)} layers, micro-batches of {size} rows, estimated for {', '.join(rates)}")
        of_layers: list[_Works] = []
        with meta:  # also what layers make without saying where
            found, _ = measure_stages(
                alone(twin),
                [meta] * len(module),
                twins.micro_batch(size, meta),
                0.0,
                ignored,
                split=range(len(module)),
                stage_type=functools.partial(CountedStage, works=of_layers),
            )
        measured.append(found)
        works.append(of_layers)
    kinds = {
        kind: DeviceKind(
            tuple(tuple(LayerSeconds(*(work.seconds(speed) for work in each)) for each in row) for row in works),
            memory=speed.memory,
            estimated=True,
        )
        for kind, speed in rates.items()
    }
    return profile_of(module, batch, rows, measured, kinds)


def _by_kind(rates: Any) -> Mapping[str, Rates]:
    found = {"device": rates} if isinstance(rates, Rates) else rates
    if not isinstance(found, Mapping) or not all(isinstance(each, Rates) for each in found.values()):
        raise TypeError(f"rates is {rates!r}: wanted Rates by the name of each kind, such as {{'gpu': Rates(...)}}")
    if unnamed := [name for name in found if not isinstance(name, str)]:
        raise TypeError(f"rates has the name {unnamed[0]!r}: wanted a text, such as 'gpu'")
    return found


@dataclass(frozen=True)
class Rates:
    """How fast a kind of device is.

    Attributes:
        operations: floating-point operations a second that large matrix products reach, in the dtype of the model.
        bytes_per_second: of its memory.
        memory: its bytes; None: unknown.
        launch: seconds that an operator takes at least.

    Raises:
        TypeError: one of them is no number.
        ValueError: a number is not above 0.

    Example:
        >>> Rates(operations=400e12, bytes_per_second=3e12, memory=80 * 2**30).launch
        5e-06
    """

    operations: float
    bytes_per_second: float
    memory: int | None = None
    launch: float = 5e-6

    def __post_init__(self) -> None:
        for name in ("operations", "bytes_per_second", "memory", "launch"):
            value = getattr(self, name)
            if value is None and name == "memory":
                continue
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise TypeError(f"Rates: {name} is {value!r}: wanted a number")
            if not 0 < value < float("inf"):
                raise ValueError(f"Rates: {name} is {value!r}: wanted a finite number above 0")


class Work(NamedTuple):
    """What some operators do: of each, its floating-point operations, and the bytes that it reads and writes."""

    operators: tuple[tuple[int, int], ...] = ()

    def seconds(self, rates: Rates) -> float:
        """Each operator either computes or moves bytes as fast as the device can, and none is faster than its launch.

        Example:
            >>> Work(((2000, 10), (0, 30))).seconds(Rates(operations=1000, bytes_per_second=10))
            5.0
        """
        return sum(
            max(operations / rates.operations, size / rates.bytes_per_second, rates.launch)
            for operations, size in self.operators
        )


def work_of(function: Callable[[], Any]) -> Work:
    """The work of all operators that a function calls, on tensors that need no memory.

    Example:
        >>> with torch.device("meta"):
        ...     x = torch.empty(4, 8)
        >>> work_of(lambda: x @ x.t())
        Work(operators=((256, 320),))
    """
    operations = FlopCounterMode(display=False)
    with operations, _Operators(operations) as found:
        function()
    return Work(tuple(found.operators))


_Works = tuple[Work, Work, Work]


class CountedStage(StageCopy):
    """A stage whose work is counted, and takes no time; see `StageCopy`."""

    def __init__(self, *arguments: Any, works: list[_Works], **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._works, self._number = works, len(works)
        works.append((Work(),) * 3)

    def _time(self, given: Any) -> tuple[float, float, float]:
        outputs: list[Any] = []
        forward = work_of(lambda: outputs.append(self._forward(given)))
        first = work_of(lambda: self._first_half(lambda: self._backward(outputs.pop())))
        second = work_of(self._second_half)
        self._end_pass()
        self._works[self._number] = forward, first, second  # the last pass counts
        return 0.0, 0.0, 0.0


class _Operators(torch_private.DispatchMode):  # type: ignore[misc]
    """Counts what operators do.

    Args:
        operations: counts floating-point operations, below this mode.
    """

    def __init__(self, operations: FlopCounterMode) -> None:
        super().__init__()
        self._operations = operations
        self.operators: list[tuple[int, int]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Runs the operator."""
        before = self._operations.get_total_flops()
        result = func(*args, **(kwargs or {}))
        given, made = (nested.flatten(each)[0] for each in ((args, kwargs or {}), result))
        if not _keys(made) <= _keys(given) or torch_private.changes_arguments(func):  # views move nothing
            size = sum(each.nbytes for each in (*given, *made))
            self.operators.append((self._operations.get_total_flops() - before, size))
        return result


def _keys(tensors: Iterable[torch.Tensor]) -> set[int]:
    return {torch_private.storage_key(each.untyped_storage()) for each in tensors}
