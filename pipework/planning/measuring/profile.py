"""Measures the layers of a model, each alone, for several sizes of a micro-batch and kinds of device."""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Mapping
from contextlib import ExitStack
from math import inf
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from pipework.assignment.from_plan import layer_info
from pipework.assignment.partition import check_initialised, chosen_devices, grouped
from pipework.model.sequential import named_layers
from pipework.planning.layer_costs import DeviceKind, LayerBytes, LayerSeconds, LinkSpeed, SkipBytes
from pipework.planning.measuring.any_model import as_layers
from pipework.planning.measuring.links import device_kind, measure_host_link, measure_links
from pipework.planning.measuring.rates import MetaNumbers, Rates, checked_rates, rated_clock
from pipework.planning.measuring.sample_batch import SampleBatch
from pipework.planning.measuring.stage_copy import measure_stages
from pipework.planning.profiles import Profile
from pipework.planning.request import micro_batch_counts
from pipework.runtime.device import is_accelerator
from pipework.schedule.argument_checks import checked_tuple, positive_integers
from pipework.skip.layout import skip_edges

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from pipework.model.sequential import Device
    from pipework.planning.measuring.stage_copy import Measured, Sample

_META = torch.device("meta")
_ROUNDS = 3  # a burst of other load on the machine touches one of them
SIZES = 4  # of micro-batches, if the caller names none


def profile(
    module: nn.Module,
    sample: Any,
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
        module: the layers, or any module that `pipework.attach` takes.
        sample: the inputs of a mini-batch; a tuple is spread into positional arguments. Of a module that is no
            `nn.Sequential`, what `attach` takes.
        target: of the loss; None: the loss is not measured. A module that computes its loss itself has it in the
            sample, as 'labels' or under the name that is given here.
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
        TypeError: `module` is no module, or there is no tensor in the sample.
        ValueError: one of target and loss function is missing, the sample cannot be split, a number of rows is out of
            range, the module has no layer or cannot be cut, or times of "meta" are wanted.

    Example:
        >>> layers = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
        >>> found = profile(layers, torch.zeros(8, 4), devices=["cpu", "cpu"], rows=[2, 4], timeout=0)
        >>> found.rows, [layer.type for layer in found.layers]
        ((2, 4), ['Linear', 'ReLU', 'Linear'])
    """
    report = checked_report(progress)
    module, given = as_layers(module, sample, keywords, target, loss_fn)
    return profile_of(
        module, SampleBatch.of(module, **given), devices, timeout, report, rows=rows, rates=rates, workers=workers
    )


def profile_of(
    module: nn.Sequential,
    batch: SampleBatch,
    devices: Sequence[Device] | None,
    timeout: float,
    report: Callable[[str], None],
    *,
    rows: Sequence[int] | None = None,
    rates: Mapping[str, Rates] | Rates | None = None,
    workers: int = 8,
) -> Profile:
    """The profile of layers, for a mini-batch; the other arguments are those of `profile`."""
    if isinstance(timeout, bool) or not isinstance(timeout, int | float) or not 0 <= timeout < inf:
        raise ValueError(f"timeout is {timeout!r}: wanted a finite number of seconds, at least 0")
    positive_integers(workers=workers)
    check_initialised(module)
    places: list[torch.device] = []
    if rates is None:
        places = chosen_devices(devices, len(module))
        if not places:
            raise ValueError("devices is empty: give one for each worker")
        if timeout and _META in places:
            raise ValueError(
                "devices has 'meta', which computes nothing, so times there say nothing of a device: give rates= in "
                "place of devices=, such as Rates(operations=400e12, bytes_per_second=3e12)"
            )
        ways = {device_kind(place): _Way(place, places.count(place), timeout) for place in places}
    elif devices is None:
        batch = batch.on(_META)
        ways = {kind: _Way(_META, rates=speed) for kind, speed in checked_rates(rates).items()}
    else:
        raise ValueError("give either devices=, which are measured, or rates= of devices that are not here")
    if batch.made is not None:
        rows = [-(-batch.rows // batch.made)]
    sizes = micro_batch_sizes(batch.rows, len(places) or workers, rows)
    kinds: dict[str, DeviceKind] = {}
    for kind, way in ways.items():
        tables: list[list[Measured]] = []  # each layer, for each size
        for size in sizes:
            report(f"{kind}: {len(module)} layers, micro-batches of {size} rows{', estimated' if way.rates else ''}")
            try:
                tables.append(way.layers(module, batch.sample(size)))
            except ValueError as error:  # such as a batch norm over one row
                if tables or size == sizes[-1]:
                    raise
                report(f"left out, because a layer refuses micro-batches of {size} rows: {error}")
        sizes = sizes[-len(tables) :]
        seconds = tuple(tuple(each.seconds for each in row) for row in tables)
        kinds[kind] = DeviceKind(seconds, way.memory, bool(way.rates), way.host)
    skips = []
    for edge in skip_edges(alone(module)):
        skip_bytes = tuple(row[edge.source].bytes.stashed.get(edge.key, (0, 0))[0] for row in tables)
        skips += [SkipBytes(edge.source, target, skip_bytes) for target in edge.destinations]
    return Profile(
        batch=batch.rows,
        rows=sizes,
        layers=tuple(layer_info(name, layer) for name, layer in named_layers(module)),
        bytes=tuple(tuple(map(_layer_bytes, row)) for row in tables),
        kinds=kinds,
        devices={str(place): device_kind(place) for place in places},
        links=measure_links(places, report),
        skips=tuple(skips),
        loss_inside=batch.target is not None,
    )


class _Way(NamedTuple):
    """How layers are measured for a kind of device.

    Attributes:
        place: where copies run.
        sharing: how many workers share the cores, on the CPU.
        seconds: for each layer.
        rates: of a device that is not here.
    """

    place: torch.device
    sharing: int = 1
    seconds: float = 0.0
    rates: Rates | None = None

    @property
    def memory(self) -> int | None:
        """The bytes of the device."""
        if self.rates:
            return self.rates.memory
        return torch.accelerator.get_memory_info(self.place)[1] if is_accelerator(self.place) else None

    @property
    def host(self) -> LinkSpeed | None:
        """The link to the host's memory."""
        if self.rates:
            speed = self.rates.host_bytes_per_second
            return None if speed is None else LinkSpeed(0.0, speed)
        # Activations of CPU workers are in host memory already.
        return measure_host_link(self.place) if is_accelerator(self.place) else None

    def layers(self, module: nn.Sequential, sample: Sample) -> list[Measured]:
        """Each layer alone, with the median times of some rounds."""
        rounds: list[list[Measured]] = []
        end = time.perf_counter() + self.seconds * len(module)
        with ExitStack() as stack:
            if self.rates:  # layers make new tensors on the meta device, too
                stack.enter_context(self.place)
                stack.enter_context(MetaNumbers())
            for _ in range(_ROUNDS if self.seconds else 1):
                found = measure_stages(
                    alone(module),
                    [self.place] * len(module),
                    sample,
                    self.seconds / _ROUNDS,
                    cpu_workers=self.sharing,
                    split=range(len(module)),
                    clock=functools.partial(rated_clock, self.rates) if self.rates else None,
                    moves=self.host is not None,
                )
                rounds.append(found)
                if time.perf_counter() > end:  # a pass may take longer than what there is for it
                    break
        layers = zip(*rounds, strict=True)
        return [same[0]._replace(seconds=LayerSeconds.median(each.seconds for each in same)) for same in layers]


def _layer_bytes(measured: Measured) -> LayerBytes:
    found = measured.bytes
    needs = (
        found.forward.most - found.kept_with_output,
        *(each.most + found.returned for each in found.backward),
        *(each.most for each in found.weight),
    )
    return LayerBytes(
        input=found.given,
        kept=found.kept,
        output_kept=found.kept_with_output - found.kept,
        output=found.message,
        waiting=found.waiting + found.given * (found.input_waits > 0),
        temporary=max(0, *needs),
        saves_input=int(found.saves_input),
        stays=max(0, found.kept - sum(found.moved_alone)),
    )


def alone(module: nn.Sequential) -> list[nn.Sequential]:
    """Each layer as a stage of its own."""
    return grouped(named_layers(module), [1] * len(module))


def checked_report(progress: Any) -> Callable[[str], None]:
    """What is called with lines of text; None: the logger "pipework" (INFO)."""
    if progress is not None and not callable(progress):
        raise TypeError(f"progress is {progress!r}: wanted a function that takes a line of text, such as print")
    found: Callable[[str], None] = progress or logging.getLogger("pipework").info
    return found


def micro_batch_sizes(batch: int, workers: int, rows: Sequence[int] | None) -> tuple[int, ...]:
    """The sizes of micro-batches to measure."""
    if rows is None:
        all_sizes = sorted({-(-batch // count) for count in micro_batch_counts(batch, workers)})
        few = min(SIZES, len(all_sizes))
        return tuple(sorted({all_sizes[round(i * (len(all_sizes) - 1) / max(1, few - 1))] for i in range(few)}))
    given = checked_tuple("rows", rows, "[8, 32]")
    if not given or any(type(size) is not int or not 1 <= size <= batch for size in given):
        raise ValueError(f"rows is {rows!r}: wanted sizes of micro-batches from 1 to {batch}, the sample's rows")
    return tuple(sorted(set(given)))
