"""Measures the layers of a model, each alone, for several sizes of a micro-batch and kinds of device."""

from __future__ import annotations

import logging
import statistics
from collections import OrderedDict
from dataclasses import dataclass, replace
from math import inf
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from pipework.assignment.balance import check_initialised, not_sequential
from pipework.assignment.devices import Machine, checked_devices, default_devices
from pipework.model.sequential import named_layers
from pipework.planning.balance.by_time import device_kind
from pipework.planning.prediction.predict import measure_stages
from pipework.planning.profiles.layer_costs import DeviceKind, LayerSeconds
from pipework.planning.profiling.estimate import estimated
from pipework.planning.profiling.layers import alone, ignored, profile_of, seconds_of
from pipework.planning.profiling.links import measure_links
from pipework.planning.profiling.micro_batches import SampleBatch
from pipework.planning.request import micro_batch_counts
from pipework.runtime.out_of_memory import is_out_of_memory
from pipework.schedule.argument_checks import checked_tuple, positive_integers
from pipework.values import nested

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from pipework.model.sequential import Device
    from pipework.planning.prediction.stage_copy import Measured
    from pipework.planning.profiles.profile import Profile
    from pipework.planning.profiling.estimate import Rates

_ROUNDS = 3  # a burst of other work on the machine touches one of them
_SIZES = 4  # of micro-batches, if the caller names none


def profile(
    module: nn.Sequential,
    sample: Tensor | tuple[Any, ...],
    *,
    target: Any = None,
    loss_fn: Callable[[Any, Any], Tensor] | None = None,
    devices: Sequence[Device] | None = None,
    rows: Sequence[int] | None = None,
    rates: Mapping[str, Rates] | Rates | None = None,
    workers: int = 8,
    keywords: Mapping[str, Any] | None = None,
    timeout: float = 0.2,
    progress: Callable[[str], None] | None = None,
) -> Profile:
    """Measure the seconds and bytes of each layer, for :func:`pipework.plan`.

    Copies of the layers run forward and backward, each alone, as a stage of a pipe runs them. Parameters, buffers,
    gradients and random states stay as they are.

    Args:
        module: the layers.
        sample: the inputs of a mini-batch; a tuple is spread into positional arguments.
        target: of the loss; None: the loss is not measured.
        loss_fn: as for `Pipe`.
        devices: those of the pipe, one for each worker; each kind of device among them is measured, the CPU with the
            threads that each of its workers gets. None: all accelerators, else CPU workers.
        rows: the sizes of micro-batches to measure; others lie on lines between them. None: up to four, from one
            micro-batch for each worker to 32.
        rates: for devices that are not here: by a name of each kind, how fast it is; `Rates` alone are those of one
            kind, which is called "device". Times are then computed from the operations and bytes of the layers, which
            may be on the meta device, and marked as estimated; links are to be added with `dataclasses.replace`.
        workers: with `rates`, about how many devices there will be, from which the sizes of micro-batches follow.
        keywords: keyword arguments of the first layer.
        timeout: seconds to measure each layer, for each size and kind of device.
        progress: called with a line of text for each step; None: lines are logged to "pipework" (INFO).

    Raises:
        TypeError: `module` is no `nn.Sequential`, or there is no tensor in the sample.
        ValueError: one of target and loss function is missing, the sample cannot be split, a number of rows is out of
            range, or the module has no layer.

    Example:
        >>> layers = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
        >>> found = profile(layers, torch.zeros(8, 4), devices=["cpu", "cpu"], rows=[2, 4], timeout=0)
        >>> found.rows, [layer.type for layer in found.layers]
        ((2, 4), ['Linear', 'ReLU', 'Linear'])
    """
    if not isinstance(module, nn.Sequential):
        raise not_sequential(module)
    check_initialised(module)
    report = checked_report(progress)
    if isinstance(timeout, bool) or not isinstance(timeout, int | float) or not 0 <= timeout < inf:
        raise ValueError(f"timeout is {timeout!r}: wanted a finite number of seconds, at least 0")
    positive_integers(workers=workers)
    batch = SampleBatch.of(module, sample, keywords, target, loss_fn)
    if rates is not None:
        if devices is not None:
            raise ValueError("give either devices=, which are measured, or rates= of devices that are not here")
        return estimated(module, batch, micro_batch_sizes(batch.rows, workers, rows), rates, report)
    machine = Machine.here()
    places = default_devices(len(module), False, machine) if devices is None else checked_devices(devices, machine)
    if not places:
        raise ValueError("devices is empty: give one for each worker")
    _refuse_meta(module, batch)
    sizes = micro_batch_sizes(batch.rows, len(places), rows)
    by_kind = {device_kind(place): place for place in reversed(places)}
    cpu_workers = sum(place.type == "cpu" for place in places)
    kinds: dict[str, DeviceKind] = {}
    measured: list[list[Measured]] = []
    for kind, place in by_kind.items():
        measuring = _Measuring(module, batch, place, cpu_workers if place.type == "cpu" else 1, timeout)
        tables = []
        for size in sizes:
            report(f"{kind}: {len(module)} layers, micro-batches of {size} rows")
            try:
                tables.append(measuring.layers(size))
            except ValueError as error:  # such as a batch norm over one row
                if tables or size == sizes[-1]:
                    raise
                report(f"left out, because a layer refuses micro-batches of {size} rows: {error}")
        sizes = sizes[-len(tables) :]
        measured = measured or [found for found, _ in tables]
        joined = measuring.joined(sizes[0], tables[0][1])
        kinds[kind] = DeviceKind(tuple(seconds for _, seconds in tables), joined, _memory(place))
    found = profile_of(module, batch, sizes, measured, kinds)
    return replace(
        found, devices={str(place): device_kind(place) for place in places}, links=measure_links(places, report)
    )


def checked_report(progress: Any) -> Callable[[str], None]:
    """What is called with lines of text; None: the logger "pipework" (INFO)."""
    if progress is not None and not callable(progress):
        raise TypeError(f"progress is {progress!r}: wanted a function that takes a line of text, such as print")
    found: Callable[[str], None] = progress or logging.getLogger("pipework").info
    return found


def _refuse_meta(module: nn.Sequential, batch: SampleBatch) -> None:
    """Raises a ValueError if there is nothing to compute with."""
    given = nested.flatten((batch.inputs, batch.keywords, batch.target))[0]
    held = [*module.parameters(), *module.buffers()]
    for what, tensors in (("the sample", given), ("the model", held)):
        if any(each.is_meta for each in tensors):
            raise ValueError(
                f"{what} is on the meta device, which computes nothing: give rates=Rates(...) to estimate times, or "
                "real tensors to measure them"
            )


def micro_batch_sizes(batch: int, workers: int, rows: Sequence[int] | None) -> tuple[int, ...]:
    """The sizes of micro-batches to measure."""
    if rows is None:
        counts = micro_batch_counts(batch, workers)
        all_sizes = sorted({-(-batch // count) for count in counts})
        few = min(_SIZES, len(all_sizes))
        return tuple(sorted({all_sizes[round(i * (len(all_sizes) - 1) / max(1, few - 1))] for i in range(few)}))
    for size in checked_tuple("rows", rows, "[8, 32]"):
        if isinstance(size, bool) or not isinstance(size, int) or not 1 <= size <= batch:
            raise ValueError(f"rows has {size!r}: wanted sizes of micro-batches from 1 to {batch}, the sample's rows")
    if not rows:
        raise ValueError("rows is empty: give sizes of micro-batches to measure, or None")
    return tuple(sorted(set(rows)))


@dataclass(frozen=True)
class _Measuring:
    """Measurements on one kind of device.

    Attributes:
        module: the layers.
        batch: the mini-batch.
        place: the device.
        workers: on the CPU, how many share its cores.
        timeout: seconds to measure each layer.
    """

    module: nn.Sequential
    batch: SampleBatch
    place: torch.device
    workers: int
    timeout: float

    def layers(self, rows: int) -> tuple[list[Measured], tuple[LayerSeconds, ...]]:
        """Each layer's measurement; its times are the median of several rounds over all layers."""
        rounds = [self._measured(alone(self.module), rows) for _ in range(_ROUNDS)]
        seconds = [
            LayerSeconds(*(statistics.median(column) for column in zip(*map(seconds_of, each), strict=True)))
            for each in zip(*rounds, strict=True)
        ]
        return rounds[0], tuple(seconds)

    def joined(self, rows: int, layers: Sequence[LayerSeconds]) -> tuple[float, float, float]:
        """What two layers save if they are on one stage: all layers alone take longer than all in one stage."""
        if len(layers) == 1:
            return 0.0, 0.0, 0.0
        whole = nn.Sequential(OrderedDict(named_layers(self.module)))
        try:
            rounds = [self._measured([whole], rows)[0] for _ in range(_ROUNDS)]
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error) and not isinstance(error, MemoryError):
                raise
            return 0.0, 0.0, 0.0  # then layers are large, and what their stages take is small beside them
        together = [statistics.median(column) for column in zip(*map(seconds_of, rounds), strict=True)]
        sums = [sum(column) for column in zip(*layers, strict=True)]
        forward, inputs, weights = (
            max(0.0, every - one) / (len(layers) - 1) for every, one in zip(sums, together, strict=True)
        )
        return forward, inputs, weights

    def _measured(self, stages: list[nn.Sequential], rows: int) -> list[Measured]:
        found, elsewhere = measure_stages(
            stages,
            [self.place] * len(stages),
            self.batch.micro_batch(rows),
            self.timeout / _ROUNDS,
            ignored,
            cpu_workers=self.workers,
            split=range(len(stages)),
        )
        if elsewhere:
            raise MemoryError(
                f"layer {elsewhere[0]} alone does not fit on {self.place} with a micro-batch of {rows} rows: measure "
                "smaller ones with rows=[...]"
            )
        return found


def _memory(place: torch.device) -> int | None:
    if place.type in ("cpu", "meta"):
        return None
    return torch.accelerator.get_memory_info(place)[1]
