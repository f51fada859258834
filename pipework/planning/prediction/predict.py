"""Predicts the cost of a step before the first one: measures copies of each stage, then simulates the schedule."""

from __future__ import annotations

import functools
import logging
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch

from pipework.model import mini_batch
from pipework.planning.balance.sandbox import threads_of_a_worker, traceless
from pipework.planning.prediction.device_peaks import device_peaks
from pipework.planning.prediction.mini_batch_form import batch_bytes, largest_micro_batch
from pipework.planning.prediction.optimizer_bytes import optimizer_bytes
from pipework.planning.prediction.sharing import Sharing, sharing
from pipework.planning.prediction.stage_copy import Sample, StageCopy, Tracker
from pipework.runtime.device import is_accelerator
from pipework.runtime.out_of_memory import is_out_of_memory
from pipework.schedule import Costs, simulate
from pipework.schedule.draw.units import aligned
from pipework.summary import readable_bytes
from pipework.values import nested

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

    from torch import nn

    from pipework.model.mini_batch import MiniBatch
    from pipework.model.sequential import TupleRule
    from pipework.planning.prediction.optimizer_bytes import OptimizerBytes
    from pipework.planning.prediction.stage_copy import ActionBytes, Measured
    from pipework.runtime.stage.loss import InnerLoss
    from pipework.runtime.transport import Message
    from pipework.schedule import Schedule, Simulation


@dataclass(frozen=True)
class StageBytes:
    """The most that a stage holds, in bytes.

    Attributes:
        weights: its parameters.
        gradients: one for each parameter that is trained. If `.grad` is not None before a step, there are twice as many
            until `backward()` has added them.
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
        measured_on_cpu: the stages that could not be measured on their device, which had no memory left for it. Their
            bytes are right, their times are those of the CPU.
        actions: what the actions of each stage need.
        outputs: bytes of each micro-batch's output, if the loss is outside of the pipe.
    """

    devices: tuple[torch.device, ...]
    stages: tuple[StageBytes, ...]
    costs: Costs
    simulation: Simulation
    device_bytes: Mapping[torch.device, int] = field(default_factory=dict)
    measured_on_cpu: tuple[int, ...] = ()
    actions: tuple[ActionBytes, ...] = field(default=(), repr=False)
    outputs: tuple[int, ...] = field(default=(), repr=False)

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

    def sharing(self, replicas: int) -> Sharing:
        """What each rank holds if there are replicas, each worker is a process, and replicas share.

        Args:
            replicas: how many there are, as in ``pipework.init(dp=...)``.

        Raises:
            ValueError: it is no positive integer.

        Example:
            >>> from pipework import Pipe
            >>> module = torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.ReLU(), torch.nn.Linear(32, 2))
            >>> pipe = Pipe(module, chunks=4, balance=[2, 1], devices=["cpu", "cpu"])
            >>> prediction = pipe.predict(torch.randn(16, 32), optimizer=2, timeout=0)
            >>> [(each.choice, each.between_steps) for each in prediction.sharing(replicas=2).ranks]
            [('replicas', 12672), ('ZeRO-1', 8448), ('fully_shard', 6336)]
        """
        return sharing(self, replicas)

    def __str__(self) -> str:
        names = ["weights", "gradients", "buffers", "activations", "optimizer", "total"]
        if not any(stage.optimizer for stage in self.stages):
            names.remove("optimizer")
        rows: list[tuple[str, ...]] = [("stage", "device", *names)]
        for number, (stage, device) in enumerate(zip(self.stages, self.devices, strict=True)):
            rows.append((str(number), str(device), *(readable_bytes(getattr(stage, name)) for name in names)))
        line = self.simulation.timeline
        at_once = ", ".join(f"{readable_bytes(size)} on {device}" for device, size in self.device_bytes.items())
        return "\n".join(
            [
                f"predicted: {self.simulation.schedule.title}",
                *aligned(rows, left={1}),
                f"step {self.seconds:.3g} s, bubble {line.bubble:.1%}, "
                f"largest worker {readable_bytes(max(self.worker_bytes))}",
                f"at most {at_once} at once",
                *self._doubts(),
            ]
        )

    def _doubts(self) -> list[str]:
        if not self.measured_on_cpu:
            return []
        which = ", ".join(map(str, self.measured_on_cpu))
        return [f"measured on the CPU, because the device ran out of memory: stage {which}; its times are the CPU's"]


def predict_call(
    partitions: Sequence[nn.Sequential],
    devices: Sequence[torch.device],
    schedule: Schedule,
    split: MiniBatch,
    targets: Sequence[Message] | None,
    loss: InnerLoss | None,
    tuples: TupleRule,
    *,
    optimizer: torch.optim.Optimizer | float | None,
    timeout: float,
    progress: Callable[[str], None] | None,
) -> Prediction:
    """Predicts the step of a mini-batch that is split already; see `predict_step` and `Sample`."""
    largest = largest_micro_batch(split)
    sample = Sample(*mini_batch.arguments_of(split.micro_batches[largest]), loss, tuples=tuples)
    if targets is not None:
        sample = replace(sample, target=nested.unflatten(*targets[largest]))
    return predict_step(
        partitions,
        devices,
        schedule,
        sample,
        batch=batch_bytes(split, targets, devices),
        optimizer=optimizer,
        timeout=timeout,
        progress=progress,
    )


def predict_step(
    partitions: Sequence[nn.Sequential],
    devices: Sequence[torch.device],
    schedule: Schedule,
    sample: Sample,
    *,
    batch: Sequence[tuple[torch.device, int]],
    optimizer: torch.optim.Optimizer | float | None,
    timeout: float,
    progress: Callable[[str], None] | None,
) -> Prediction:
    """Measures every stage on one micro-batch, then simulates the schedule.

    Args:
        partitions: the layers of each stage. They are copied, one stage at a time, and stay as they are.
        devices: of each stage.
        schedule: of the whole step.
        sample: its largest micro-batch.
        batch: devices of the mini-batch's inputs and targets, and their bytes.
        optimizer: see `optimizer_bytes`.
        timeout: seconds to measure each stage; at least two passes are made.
        progress: called with a line of text for each stage; None: the line is logged to "pipework" (INFO).
    """
    report = progress or logging.getLogger("pipework").info
    measured, elsewhere = measure_stages(
        partitions,
        devices,
        sample,
        timeout,
        report,
        cpu_workers=cpu_workers_of(schedule.placement, devices),
        split=schedule.split_stages,
    )
    of_optimizer = functools.partial(optimizer_bytes, optimizer)
    return predicted(partitions, devices, schedule, sample, measured, batch, of_optimizer, elsewhere)


def measure_stages(
    partitions: Sequence[nn.Sequential],
    devices: Sequence[torch.device],
    sample: Sample,
    timeout: float | None,
    report: Callable[[str], None],
    *,
    cpu_workers: int = 1,
    split: Collection[int] = (),
    stage_type: Callable[..., StageCopy] = StageCopy,
) -> tuple[list[Measured], tuple[int, ...]]:
    """Runs copies of the stages, one after the other.

    Args:
        partitions: see `predict_step`, like `devices` and `sample`.
        devices: of each stage.
        sample: a micro-batch.
        timeout: seconds to measure each stage; None: bytes only.
        report: called with a line for each stage.
        cpu_workers: how many workers share the cores.
        split: the stages whose backward is split.
        stage_type: makes the copies.

    Returns:
        What was measured, and which stages ran on the CPU instead of their device.
    """
    tracker = Tracker()
    value: Any = sample
    measured: list[Measured] = []
    elsewhere: list[int] = []
    for number, (partition, device) in enumerate(zip(partitions, devices, strict=True)):
        of_last = sample if number == len(partitions) - 1 else None
        measure = functools.partial(
            _measure,
            partition,
            tracker,
            value,
            of_last,
            timeout,
            stage_type,
            tuples=sample.tuples,
            splits=number in split,
        )
        try:
            with threads_of_a_worker(cpu_workers if device.type == "cpu" else 1):
                one, value = measure(device)
        except RuntimeError as error:
            if not (is_accelerator(device) and is_out_of_memory(error)):
                raise
            elsewhere.append(number)
        if number in elsewhere:  # not while the error keeps what was measured alive
            one, value = measure(torch.device("cpu"))
        measured.append(one)
        backward = f"backward {one.first_half:.3g} s"
        if one.second_half:
            backward = f"input gradient {one.first_half:.3g} s, weight gradient {one.second_half:.3g} s"
        report(
            f"stage {number + 1} of {len(partitions)}: forward {one.forward:.3g} s, {backward}, "
            f"activations of a micro-batch {readable_bytes(one.activation)}"
        )
    return measured, tuple(elsewhere)


def cpu_workers_of(placement: Sequence[int], devices: Sequence[torch.device]) -> int:
    """The number of workers on the CPU, from the worker and device of each stage."""
    return len({worker for worker, device in zip(placement, devices, strict=True) if device.type == "cpu"})


def predicted(
    partitions: Sequence[nn.Sequential],
    devices: Sequence[torch.device],
    schedule: Schedule,
    sample: Sample,
    measured: Sequence[Measured],
    batch: Sequence[tuple[torch.device, int]],
    of_optimizer: Callable[[Sequence[Iterable[nn.Parameter]], torch.device], OptimizerBytes],
    elsewhere: tuple[int, ...] = (),
) -> Prediction:
    """Simulates the schedule with what `measure_stages` has found; see `predict_step`."""
    split = schedule.split_stages
    costs = Costs(
        forward=[one.forward for one in measured],
        backward=[one.first_half + one.second_half for one in measured],
        input_gradient=[one.first_half for one in measured] if split else None,
        weight_gradient=[one.second_half for one in measured] if split else None,
        activation=[one.activation for one in measured],
        checkpoint_activation=[one.checkpoint for one in measured],
        waiting=[one.waiting for one in measured] if split else None,
        message=[one.message for one in measured[:-1]],
    )
    simulation = simulate(schedule, costs, loss_outside=sample.loss is None)
    stages = [
        StageBytes(*_fixed_bytes(partition), activations=round(peak))
        for partition, peak in zip(partitions, simulation.stage_peak_memory, strict=True)
    ]
    outputs = [] if sample.loss is not None else [measured[-1].message] * schedule.micro_batches
    actions = tuple([one.actions for one in measured])
    found = device_peaks(simulation.timeline, actions, devices, outputs)
    peaks = {device: peak.total for device, peak in found.items()}
    for device in peaks:
        own = [number for number, other in enumerate(devices) if other == device]
        optimizer = of_optimizer([partitions[number].parameters() for number in own], device)
        for number, state in zip(own, optimizer.states, strict=True):
            stages[number] = replace(stages[number], optimizer=state)
        gradients = sum(stages[number].gradients for number in own)
        peaks[device] = max(peaks[device], gradients + optimizer.step)
        peaks[device] += sum(stages[n].weights + stages[n].buffers + stages[n].optimizer for n in own)
        peaks[device] += sum(size for place, size in batch if place == device)
    return Prediction(tuple(devices), tuple(stages), costs, simulation, peaks, elsewhere, actions, tuple(outputs))


def _measure(
    partition: nn.Sequential,
    tracker: Tracker,
    value: Any,
    of_last: Sample | None,
    timeout: float | None,
    stage_type: Callable[..., StageCopy],
    device: torch.device,
    *,
    tuples: TupleRule,
    splits: bool,
) -> tuple[Measured, Any]:
    with traceless(device):
        stage = stage_type(partition, device, tracker, of_last, tuples=tuples, splits=splits)
        return stage.measure(value, timeout)


def _fixed_bytes(partition: nn.Sequential) -> tuple[int, int, int]:
    parameters = list(partition.parameters())
    return (
        sum(parameter.nbytes for parameter in parameters),
        sum(parameter.nbytes for parameter in parameters if parameter.requires_grad),
        sum(buffer.nbytes for buffer in partition.buffers()),
    )
