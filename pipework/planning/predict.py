"""Predicts the cost of a step before the first one: measures copies of each stage, then simulates the schedule."""

from __future__ import annotations

import copy
import logging
import statistics
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from pipework.autograd.aliases import Aliases
from pipework.autograd.weight_split.store import WeightGradientStore
from pipework.balance.sandbox import cut, entered, now, tensors_of, threads_of_a_worker, traceless
from pipework.model.tuples import TupleRule
from pipework.runtime.skips import skip_tracker
from pipework.runtime.stage.buffers import MutableBuffers
from pipework.runtime.stage.memory_meter import MemoryMeter
from pipework.schedule import Costs, simulate
from pipework.schedule.draw.aligned import aligned
from pipework.summary import readable_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Sequence

    from pipework.runtime.stage.loss import InnerLoss
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
    """

    weights: int
    gradients: int
    buffers: int
    activations: int

    @property
    def total(self) -> int:
        """The sum of all parts."""
        return self.weights + self.gradients + self.buffers + self.activations


@dataclass(frozen=True)
class Prediction:
    """What `pipe.predict` returns; `print` it for a table.

    Attributes:
        devices: of each stage.
        stages: the most that each stage holds. The stages of one worker need not reach their maxima at the same moment.
        costs: of the actions, in seconds and bytes.
        simulation: of the schedule with these costs.
    """

    devices: tuple[torch.device, ...]
    stages: tuple[StageBytes, ...]
    costs: Costs
    simulation: Simulation

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
        rows: list[tuple[str, ...]] = [("stage", "device", "weights", "gradients", "buffers", "activations", "total")]
        for number, (stage, device) in enumerate(zip(self.stages, self.devices, strict=True)):
            sizes = (stage.weights, stage.gradients, stage.buffers, stage.activations, stage.total)
            rows.append((str(number), str(device), *map(readable_bytes, sizes)))
        line = self.simulation.timeline
        return "\n".join(
            [
                f"predicted: {self.simulation.schedule.title}",
                *aligned(rows, left={1}),
                f"step {self.seconds:.3g} s, bubble {line.bubble:.1%}, "
                f"largest worker {readable_bytes(max(self.worker_bytes))}",
            ]
        )


@dataclass(frozen=True)
class Sample:
    """One micro-batch, its target and its loss.

    Attributes:
        arguments: positional arguments of the first layer.
        keywords: keyword arguments of the first layer.
        loss: the loss that the last stage computes; None: the loss is outside of the pipe.
        target: for the loss.
        tuples: the rule for tuples between layers.
    """

    arguments: tuple[Any, ...]
    keywords: dict[str, Any]
    loss: InnerLoss | None = None
    target: Any = None
    tuples: TupleRule = TupleRule.BY_SIGNATURE


def predict_step(
    partitions: Sequence[nn.Sequential],
    devices: Sequence[torch.device],
    schedule: Schedule,
    sample: Sample,
    *,
    timeout: float,
    progress: Callable[[str], None] | None,
) -> Prediction:
    """Measures every stage on one micro-batch, then simulates the schedule.

    Args:
        partitions: the layers of each stage. They are copied, one stage at a time, and stay as they are.
        devices: of each stage.
        schedule: of the whole step.
        sample: its largest micro-batch.
        timeout: seconds to measure each stage; at least two passes are made.
        progress: called with a line of text for each stage; None: the line is logged to "pipework" (INFO).
    """
    report = progress or logging.getLogger("pipework").info
    cpu_workers = len(
        {worker for worker, device in zip(schedule.placement, devices, strict=True) if device.type == "cpu"}
    )
    split = schedule.split_stages
    tracker = _Tracker()
    value: Any = sample
    measured = []
    for number, (partition, device) in enumerate(zip(partitions, devices, strict=True)):
        with traceless(device), threads_of_a_worker(cpu_workers if device.type == "cpu" else 1):
            last = number == len(partitions) - 1
            of_last = sample if last else None
            stage = _Stage(partition, device, tracker, of_last, tuples=sample.tuples, splits=number in split)
            one, value = stage.measure(value, timeout)
        measured.append(one)
        backward = f"backward {one.first_half:.3g} s"
        if one.second_half:
            backward = f"input gradient {one.first_half:.3g} s, weight gradient {one.second_half:.3g} s"
        report(
            f"stage {number + 1} of {len(partitions)}: forward {one.forward:.3g} s, {backward}, "
            f"activations of a micro-batch {readable_bytes(one.activation)}"
        )
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
    return Prediction(tuple(devices), tuple(stages), costs, simulation)


@dataclass(frozen=True)
class _Measured:
    """One micro-batch on one stage: seconds and bytes. A backward that is not split has no second half."""

    forward: float
    first_half: float
    second_half: float
    activation: int
    checkpoint: int
    waiting: int
    message: int


class _Stage:
    """A copy of a stage; it runs a micro-batch as the stage will."""

    def __init__(
        self,
        partition: nn.Sequential,
        device: torch.device,
        tracker: _Tracker,
        sample: Sample | None,
        *,
        tuples: TupleRule,
        splits: bool,
    ) -> None:
        self._tuples = tuples
        self._layers = list(copy.deepcopy(partition))
        for layer in self._layers:
            layer.zero_grad(set_to_none=True)
        self._device = device
        self._tracker = tracker
        self._sample = sample
        self._target: Any = None
        self._weight_store = WeightGradientStore({}) if splits else None
        self._aliases = Aliases(self._layers if splits else (), self._weight_store)
        if not self._aliases.any_deferrable:
            self._weight_store = None

    def measure(self, value: Any, timeout: float) -> tuple[_Measured, Any]:
        """Runs the stage repeatedly; returns the measurement, and the input of the next stage."""
        end = time.perf_counter() + timeout
        with self._aliases.standing_in():
            if self._weight_store is not None:
                self._time(self._fresh(value))  # the first pass shows which weight gradients can be delayed
            held, kept, waiting, output = self._count(self._fresh(value))  # slows a pass down, and warms up
            times = [self._time(self._fresh(value))]
            while time.perf_counter() < end:
                times.append(self._time(self._fresh(value)))
        self._tracker.next_stage()
        forward, first_half, second_half = (statistics.median(column) for column in zip(*times, strict=True))
        sent = sum(tensor.nbytes for tensor in tensors_of(output))
        result = _Measured(forward, first_half, second_half, held, kept, waiting, sent)
        return result, cut(output, self._device)

    def _count(self, given: Any) -> tuple[int, int, int, Any]:
        """The bytes that a micro-batch holds, without and with checkpointing, and between halves; and the output."""
        meter = MemoryMeter(tensor for layer in self._layers for tensor in (*layer.parameters(), *layer.buffers()))
        buffers = MutableBuffers(self._layers)
        before = buffers.snapshot()
        inputs = tensors_of((given.arguments, given.keywords) if isinstance(given, Sample) else given)
        # Tensors that other stages have stashed are inputs, too; they are known only after they have been popped.
        with meter.measuring(0, 0, inputs, tensors_of(self._target)):
            output = self._forward(given)
        kept = (*inputs, *self._tracker.popped, *buffers.learn(before).tensors)
        held = meter.read(0, 0)[1]
        self._first_half(output)
        waiting = 0
        if self._weight_store is not None:
            meter.waiting(0, 0, self._weight_store.kept(0))
            waiting = meter.read(0, 0)[1]
        self._second_half()
        self._end_pass()
        return held, sum(tensor.nbytes for tensor in kept), waiting, output

    def _time(self, given: Any) -> tuple[float, float, float]:
        """The seconds of a forward, of its backward (or the first half of it), and of the second half."""
        begin = now(self._device)
        output = self._forward(given)
        middle = now(self._device)
        self._first_half(output)
        end_of_first = now(self._device)
        self._second_half()
        end = now(self._device) if self._weight_store is not None else end_of_first
        self._end_pass()
        return middle - begin, end_of_first - middle, end - end_of_first

    def _forward(self, given: Any) -> Any:
        if self._weight_store is None:
            return self._run(given)
        self._weight_store.begin(0)
        output = self._run(given)
        self._weight_store.end()
        return output

    def _first_half(self, output: Any) -> None:
        if self._weight_store is None:
            self._backward(output)
        else:
            self._weight_store.differentiate(0, lambda: self._backward(output))

    def _second_half(self) -> None:
        if self._weight_store is not None:
            self._weight_store.add_weight_gradients(0, again=False)

    def _fresh(self, value: Any) -> Any:
        """Copies of the stage's input for one pass, which may overwrite them."""
        self._target = None if self._sample is None else cut(self._sample.target, self._device)
        if isinstance(value, Sample):
            arguments, keywords = cut((value.arguments, value.keywords), self._device)
            return Sample(arguments, keywords)
        return cut(value, self._device)

    def _run(self, value: Any) -> Any:
        with skip_tracker.using(self._tracker):
            if isinstance(value, Sample):
                arguments, keywords = entered((value.arguments, value.keywords))
                return self._run_layers(Sample(arguments, keywords))
            return self._run_layers(entered(value))

    def _run_layers(self, value: Any) -> Any:
        takes_target = self._sample is not None and self._sample.loss is not None and self._sample.loss.function is None
        for number, layer in enumerate(self._layers):
            last = takes_target and number == len(self._layers) - 1
            target = (self._target,) if last else ()
            if isinstance(value, Sample):
                value = layer(*value.arguments, *target, **value.keywords)
            else:
                value = layer(*self._tuples.arguments(value, layer, len(target)), *target)
        if self._sample is not None and self._sample.loss is not None:
            loss = self._sample.loss
            return loss.part(value if loss.function is None else loss.function(value, self._target), 0)
        return value

    def _backward(self, output: Any) -> None:
        ends = [tensor for tensor in (*tensors_of(output), *self._tracker.stashed) if tensor.requires_grad]
        if ends:
            torch.autograd.backward(ends, [torch.ones_like(tensor) for tensor in ends])

    def _end_pass(self) -> None:
        for layer in self._layers:
            layer.zero_grad(set_to_none=False)
        self._tracker.next_pass()


class _Tracker:
    """Keeps stashed tensors: for later stages detached from their graph, within a stage as they are."""

    def __init__(self) -> None:
        self._from_before: dict[Hashable, Tensor | None] = {}
        self._last: dict[Hashable, Tensor | None] = {}
        self._of_this_stage: dict[Hashable, Tensor | None] = {}
        self.popped: list[Tensor] = []

    @property
    def stashed(self) -> list[Tensor]:
        """The tensors stashed in this pass."""
        return [tensor for tensor in self._of_this_stage.values() if tensor is not None]

    def save(self, key: Hashable, tensor: Tensor | None, poppers: int) -> None:
        """See `SkipTracker.save`."""
        self._of_this_stage[key] = tensor

    def load(self, key: Hashable) -> Tensor | None:
        """See `SkipTracker.load`."""
        if key in self._of_this_stage:
            return self._of_this_stage[key]
        tensor = self._from_before[key]
        if tensor is None:
            return None
        leaf = cut(tensor, tensor.device)
        self.popped.append(leaf)
        return entered(leaf)  # type: ignore[no-any-return]

    def next_pass(self) -> None:
        """Prepares for another pass of the same stage."""
        self._last, self._of_this_stage, self.popped = self._of_this_stage, {}, []

    def next_stage(self) -> None:
        """Prepares for the next stage."""
        for key, tensor in self._last.items():
            self._from_before[key] = None if tensor is None else tensor.detach().requires_grad_(tensor.requires_grad)
        self._last = {}


def _fixed_bytes(partition: nn.Sequential) -> tuple[int, int, int]:
    parameters = list(partition.parameters())
    return (
        sum(parameter.nbytes for parameter in parameters),
        sum(parameter.nbytes for parameter in parameters if parameter.requires_grad),
        sum(buffer.nbytes for buffer in partition.buffers()),
    )
