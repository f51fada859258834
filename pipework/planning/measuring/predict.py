"""Predicts the cost of a step before the first one: measures copies of each stage, then simulates the schedule."""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import dataclass, field, replace
from itertools import pairwise
from math import inf
from typing import TYPE_CHECKING, Any

import torch

from pipework.assignment.from_plan import layer_info
from pipework.planning.json_file import check_numbers
from pipework.planning.measuring.device_peaks import device_peaks
from pipework.planning.measuring.links import measure_host_link
from pipework.planning.measuring.sample_batch import largest_sample
from pipework.planning.measuring.stage_copy import measure_stages
from pipework.planning.measuring.storage_meter import in_blocks, optimizer_bytes
from pipework.runtime.free_memory import free_host_memory
from pipework.runtime.host_memory import buffer_sizes
from pipework.runtime.host_optimizer import HostOptimizer
from pipework.schedule import Costs, simulate
from pipework.schedule.draw.units import aligned
from pipework.schedule.edges import offloaded
from pipework.schedule.host_peaks import host_peaks
from pipework.summary import readable_bytes
from pipework.values.tensor_form import bytes_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch import nn

    from pipework.model.mini_batch import MiniBatch
    from pipework.model.sequential import TupleRule
    from pipework.planning.measuring.stage_copy import Measured
    from pipework.schedule import Schedule, Simulation


@dataclass(frozen=True)
class StageBytes:
    """The most that a stage holds, in bytes.

    Attributes:
        weights: its parameters.
        gradients: one for each parameter that is trained; two with graphs, which leave theirs where the next step
            overwrites them, and so are copied. If `.grad` is not None before a step, there is one more until
            `backward()` has added them.
        buffers: its modules' buffers.
        activations: of all micro-batches in flight.
        optimizer: its state, if it was given.
    """

    weights: int
    gradients: int
    buffers: int
    activations: int
    optimizer: int = 0

    @property
    def total(self) -> int:
        """The sum of all parts."""
        return self.weights + self.gradients + self.buffers + self.activations + self.optimizer


@dataclass(frozen=True)
class Prediction:
    """What `pipe.predict` returns; `print` it for a table.

    Attributes:
        devices: of each stage.
        stages: the most that each stage holds. The stages of one worker need not reach their maxima at the same moment.
        costs: of the actions, in seconds and bytes.
        simulation: of the schedule with these costs.
        device_bytes: the most that each device holds at one moment of a step: the parts of `stages`, the mini-batch,
            messages, temporary tensors, and what the optimizer's step needs.
        host_bytes: of the buffers that each worker has in the memory of the host, for activations that go there, and of
            the state of a `HostOptimizer`. Sizes of buffers are powers of two, up to 64 MiB: a plan, which counts
            activations, says less.
        host_free: bytes of host memory that were free at the time of the prediction; `print` says if they are too few.
    """

    devices: tuple[torch.device, ...]
    stages: tuple[StageBytes, ...]
    costs: Costs
    simulation: Simulation
    device_bytes: Mapping[torch.device, int] = field(default_factory=dict)
    host_bytes: tuple[int, ...] = ()
    host_free: float = inf

    @property
    def seconds(self) -> float:
        """The time of a step, without optimizer, and without a loss outside of the pipe."""
        return self.simulation.makespan

    @property
    def worker_bytes(self) -> tuple[int, ...]:
        """The most that each worker holds."""
        fixed = [0] * self.simulation.schedule.workers
        for stage, worker in zip(self.stages, self.simulation.schedule.placement, strict=True):
            fixed[worker] += stage.total - stage.activations
        return tuple(round(size + peak) for size, peak in zip(fixed, self.simulation.peak_memory, strict=True))

    def __str__(self) -> str:
        names = ["weights", "gradients", "buffers", "activations", "optimizer", "total"]
        if not any(stage.optimizer for stage in self.stages):
            names.remove("optimizer")
        away = Counter(stage for stage, _ in offloaded(self.simulation.schedule))
        rows: list[tuple[str, ...]] = [("stage", "device", *names, *(["offloads"] if away else []))]
        for number, (stage, device) in enumerate(zip(self.stages, self.devices, strict=True)):
            sizes = [readable_bytes(getattr(stage, name)) for name in names]
            count = [f"{away[number]} of {self.simulation.schedule.micro_batches}"] if away else []
            rows.append((str(number), str(device), *sizes, *count))
        at_once = ", ".join(f"{readable_bytes(size)} on {device}" for device, size in self.device_bytes.items())
        lines = [
            f"predicted: {self.simulation.schedule.title}",
            *aligned(rows, left={1}),
            f"step {self.seconds:.3g} s, bubble {self.simulation.bubble:.1%} as stages take alone, without messages; "
            f"largest worker {readable_bytes(max(self.worker_bytes))}",
            f"at most {at_once} at once",
        ]
        if any(self.host_bytes):
            few = f"; {readable_bytes(self.host_free)} are free now" if sum(self.host_bytes) > self.host_free else ""
            lines.append(f"in host memory: {readable_bytes(sum(self.host_bytes))}{few}")
        return "\n".join(lines)


def predict_step(
    partitions: Sequence[nn.Sequential],
    devices: Sequence[torch.device],
    schedule: Schedule,
    batch: MiniBatch,
    tuples: TupleRule,
    *,
    optimizer: torch.optim.Optimizer | float | None,
    timeout: float,
    progress: Callable[[str], None] | None = None,
    known: Mapping[str, Any] | None = None,
    graphs: bool = False,
) -> Prediction:
    """Measures every stage on one micro-batch, then simulates the schedule.

    Args:
        partitions: the layers of each stage. They are copied, one stage at a time, and stay as they are.
        devices: of each stage.
        schedule: of the whole step.
        batch: the mini-batch in micro-batches, of which the largest is measured, with targets and loss; without a loss,
            that is outside.
        tuples: how a tuple goes from one layer to the next.
        optimizer: whose state is counted; a number: so many numbers for each parameter; None: there is none.
        timeout: seconds to measure each stage; at least one pass is timed.
        progress: called with a line of text for each stage; None: the line is logged to "pipework" (INFO).
        known: costs that are known already, by their names in `Costs`. With those of forwards no time is measured.
        graphs: whether the actions are captured as graphs, whose memory nothing else uses between steps.
    """
    if not (optimizer is None or isinstance(optimizer, (torch.optim.Optimizer, int, float))):
        raise TypeError(
            f"optimizer is {optimizer!r}: wanted an optimizer of the pipe's parameters, such as "
            "HostOptimizer(pipe.parameters(), torch.optim.AdamW); or a number, how many numbers it keeps for each "
            "parameter, such as 2 for Adam"
        )
    check_numbers("numbers of the optimizer", [optimizer] if isinstance(optimizer, int | float) else ())
    check_numbers("seconds of timeout=", (timeout,))
    known, moves = known or {}, bool(offloaded(schedule))
    measured = measure_stages(
        partitions,
        devices,
        largest_sample(batch, tuples),
        None if "forward" in known else timeout,
        progress or logging.getLogger("pipework").info,
        cpu_workers=len({w for w, device in zip(schedule.placement, devices, strict=True) if device.type == "cpu"}),
        split=schedule.split_stages,
        moves=moves,
    )
    sizes = [one.bytes for one in measured]
    shares = [here == there for here, there in pairwise(devices)] + [False]
    away = [one.memories(shares=each) for one, each in zip(sizes, shares, strict=True)]
    # The caller has the inputs of the first stage.
    inputs_away = [(), *(one.inputs for one in sizes[1:])]
    host = host_peaks(schedule, *[list(map(buffer_sizes, each)) for each in (away, inputs_away)])
    costs = _costs(measured, schedule, list(map(sum, away)), list(map(sum, inputs_away)), moves=moves)
    if moves and "offload" not in known:
        links = {device: measure_host_link(device) for device in {*devices}}
        copying = [links[device].seconds(sum(each)) for device, each in zip(devices, away, strict=True)]
        costs = replace(costs, offload=copying, reload=copying)
    simulation = simulate(schedule, replace(costs, **known), loss_outside=batch.loss is None)
    states, on_host, steps = _optimizer_bytes(optimizer, partitions, devices)
    for worker, size in zip(schedule.placement, on_host, strict=True):
        host[worker] += size
    infos = [layer_info("", partition) for partition in partitions]
    stages = [
        StageBytes(info.weights, info.trained * (1 + graphs), info.buffers, round(peak), state)
        for info, peak, state in zip(infos, simulation.stage_peak_memory, states, strict=True)
    ]
    outputs = () if batch.loss is not None else (sizes[-1].message,) * schedule.micro_batches
    of_targets = [sum(map(bytes_of, tensors)) for tensors, _ in batch.targets or ()]
    statics, orders = of_targets if graphs else None, schedule.orders if moves else ()
    peaks = device_peaks(simulation.timeline, sizes, devices, outputs, statics, orders)
    for device, peak in peaks.items():
        own = [(partitions[n], stages[n]) for n, at in enumerate(devices) if at == device]
        peaks[device] = _device_bytes(own, device, peak, steps[device], graphs=graphs)
    peaks[devices[0]] += sum(map(bytes_of, batch.tensors))
    peaks[devices[-1]] += sum(of_targets)
    return Prediction(
        tuple(devices), tuple(stages), simulation.costs, simulation, peaks, tuple(host), free_host_memory()
    )


def _costs(
    measured: Sequence[Measured], schedule: Schedule, away: Sequence[int], inputs_away: Sequence[int], *, moves: bool
) -> Costs:
    """Those of the stages, without copies to the host, which move so many bytes of a graph, or of a stage's inputs."""
    seconds, sizes = [one.seconds for one in measured], [one.bytes for one in measured]
    forward, inputs, weights = map(list, zip(*seconds, strict=True))
    splits = schedule.split_stages
    staying = [one.checkpoint - size for one, size in zip(sizes, inputs_away, strict=True)]
    return Costs(
        forward=forward,
        backward=[first + second for _, first, second in seconds],
        input_gradient=inputs if splits else None,
        weight_gradient=weights if splits else None,
        activation=[one.activation for one in sizes],
        checkpoint_activation=[one.checkpoint for one in sizes],
        waiting=[one.waiting + one.input_waits for one in sizes] if splits else None,
        message=[one.message for one in sizes[:-1]],
        offloaded=[one.activation - size for one, size in zip(sizes, away, strict=True)] if moves else 0.0,
        checkpoint_offloaded=staying if moves else None,
    )


def _optimizer_bytes(
    optimizer: torch.optim.Optimizer | float | None,
    partitions: Sequence[nn.Sequential],
    devices: Sequence[torch.device],
) -> tuple[list[int], list[int], dict[torch.device, int]]:
    """The state of each stage on its device, that on the host, and what a step needs beside it on each device."""
    states, on_host, steps = [0] * len(devices), [0] * len(devices), {}
    for device in {*devices}:
        own = [stage for stage, at in enumerate(devices) if at == device]
        found, step = optimizer_bytes(optimizer, [partitions[stage].parameters() for stage in own], device)
        goes = isinstance(optimizer, HostOptimizer) and device.type != "cpu"
        for stage, state in zip(own, found, strict=True):
            (on_host if goes else states)[stage] = state
        steps[device] = 0 if goes else step
    return states, on_host, steps


def _device_bytes(
    own: Sequence[tuple[nn.Sequential, StageBytes]], device: torch.device, peak: int, step: int, *, graphs: bool
) -> int:
    """The most that a device holds, with its stages in blocks of its allocator: in the step, or in the optimizer's."""
    tensors = [each for layers, _ in own for each in (*layers.parameters(), *layers.buffers())]
    padding = sum(in_blocks(each.nbytes, device) - each.nbytes for each in tensors)
    fixed = padding + sum(stage.weights + stage.buffers + stage.optimizer for _, stage in own)
    after = sum(stage.gradients for _, stage in own) // (1 + graphs) + step
    return fixed + (peak + after if graphs else max(peak, after))
