"""Copies of stages run one micro-batch as the stages will, and show how long that takes and what it holds.

Everything that is measured before a step is measured here: the layers of a profile and of a balance (each a stage of
its own), and the stages of a prediction and of a plan. Nothing of the user's modules and random states changes.
"""

from __future__ import annotations

import copy
import functools
import random
import time
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge, saved_tensors_hooks

from pipework import torch_private
from pipework.autograd import boundary
from pipework.autograd.aliases import Aliases
from pipework.autograd.weight_split.store import WeightGradientStore
from pipework.model.sequential import TupleRule, named_layers
from pipework.planning.layer_costs import LayerSeconds
from pipework.planning.measuring.storage_meter import StorageMeter, in_blocks
from pipework.runtime.device import is_accelerator
from pipework.runtime.skips import skip_tracker
from pipework.runtime.stage.offload import SavedTensors
from pipework.runtime.stage.recomputation import MutableBuffers
from pipework.runtime.stage.stage import Layer
from pipework.runtime.stage.stage_forward import run_layers
from pipework.schedule.draw.units import memory_text
from pipework.torch_private import memory_key
from pipework.values import nested

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence

    from pipework.runtime.stage.loss import InnerLoss

    Clock = Callable[[], AbstractContextManager[Callable[[], float]]]


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
    keywords: dict[str, Any] = field(default_factory=dict)
    loss: InnerLoss | None = None
    target: Any = None
    tuples: TupleRule = TupleRule.BY_SIGNATURE


class Need(NamedTuple):
    """What an action needs above what is there when it begins, in bytes: at most, and on average."""

    most: int
    mean: int


@dataclass(frozen=True)
class ActionBytes:
    """What the actions of one micro-batch need on the stage's device, in bytes, with all that operators allocate.

    A pair has what the first backward needs, which makes the parameters' gradients, and what all later ones need.

    Attributes:
        given: the input, without what is popped.
        message: the output, which goes to the next stage.
        forward: F or R.
        kept: what the graph holds after a forward, beside the input and the output.
        kept_with_output: the same, with the output.
        backward: B or I; the gradient of the output is there before.
        returned: the gradient of the input.
        waiting: what is kept between I and W, beside the input.
        input_waits: how much of the input is kept between I and W.
        weight: W.
        gradients: of the parameters.
        target: how much of the target the graph needs.
        clones: of buffers, which a checkpointed forward keeps.
        saves_input: whether the graph needs the input.
        moved: the sizes of the memories that an ``O`` moves while the next stage holds the output, too.
        moved_alone: the same where no other stage holds it, as on another device.
        stashed: by skip, its tensor, and how much of that no graph of this stage holds.
        popped: by skip, its tensor, and the gradient of that, which goes back to the stage that stashed it.
    """

    given: int
    forward: Need
    kept: int
    kept_with_output: int
    backward: tuple[Need, Need]
    returned: int
    waiting: int
    weight: tuple[Need, Need]
    gradients: int
    message: int = 0
    input_waits: int = 0
    target: int = 0
    clones: int = 0
    saves_input: bool = True
    moved: tuple[int, ...] = ()
    moved_alone: tuple[int, ...] = ()
    stashed: Mapping[Hashable, tuple[int, int]] = field(default_factory=dict)
    popped: Mapping[Hashable, tuple[int, int]] = field(default_factory=dict)

    @property
    def checkpoint(self) -> int:
        """What a checkpointed micro-batch holds: all that came from elsewhere, and clones of buffers."""
        return self.clones + sum(self.inputs)

    @property
    def inputs(self) -> tuple[int, ...]:
        """The sizes of all that came from elsewhere."""
        return self.given, *(size for size, _ in self.popped.values())

    @property
    def activation(self) -> int:
        """What a micro-batch holds between its forward and its backward."""
        return self.checkpoint - self.clones + self.kept + self.target

    def graph(self, *, shares: bool) -> int:
        """What a graph holds, also of the output if the next stage `shares` its memory."""
        return self.kept_with_output if shares else self.kept

    def memories(self, *, shares: bool) -> tuple[int, ...]:
        """The sizes of those of its memories that go to the host."""
        return self.moved if shares else self.moved_alone


class Measured(NamedTuple):
    """One micro-batch on one stage; all of a backward that is not split counts as its first half."""

    seconds: LayerSeconds
    bytes: ActionBytes


def measure_stages(
    partitions: Sequence[nn.Sequential],
    devices: Sequence[torch.device],
    sample: Sample,
    seconds: float | None,
    report: Callable[[str], None] | None = None,
    *,
    cpu_workers: int = 1,
    split: Collection[int] = (),
    clock: Clock | None = None,
    moves: bool = False,
) -> list[Measured]:
    """Runs copies of the stages, one after the other.

    Args:
        partitions: the layers of each stage; copies of a model in evaluation mode train.
        devices: of each stage.
        sample: a micro-batch.
        seconds: to measure each stage; None: bytes only.
        report: called with a line for each stage.
        cpu_workers: how many workers share the cores.
        split: the stages whose backward is split.
        clock: in place of that of the device; entered for each pass that is timed.
        moves: whether to find out what can go to host memory.

    Raises:
        torch.OutOfMemoryError: a stage alone needs more memory than its device has left.
    """
    tracker = Tracker()
    value: Any = (sample.arguments, sample.keywords)
    trains = not any(part.training for partition in partitions for layer in partition for part in layer.modules())
    measured: list[Measured] = []
    for number, (partition, device) in enumerate(zip(partitions, devices, strict=True)):
        is_last = number == len(partitions) - 1
        with traceless(device, cpu_workers):
            tracker.device, timer = device, clock or functools.partial(_clock_of, device)
            own = sample if is_last else replace(sample, loss=None)
            layers = copy.deepcopy(partition).to(device)
            if trains:
                layers.train()
            stage = StageCopy(layers, tracker, own, timer, is_first=number == 0, splits=number in split)
            one, value = stage.measure(value, seconds, is_last=is_last, moves=moves)
        measured.append(one)
        if report is not None:
            first, *others = (f"{each:.3g} s" for each in one.seconds)
            held = memory_text(one.bytes.activation, "bytes")
            report(
                f"stage {number + 1} of {len(partitions)}: forward {first}, backward {' and '.join(others)}, "
                f"activations of a micro-batch {held}"
            )
    return measured


class StageCopy:
    """A copy of a stage; it runs a micro-batch as the stage will.

    Args:
        layers: a copy, on the tracker's device.
        tracker: keeps what skip connections bring from one stage to another.
        sample: a micro-batch; without a loss, the stage computes none.
        clock: entered for each pass that is timed.
        is_first: whether the stage gets the mini-batch.
        splits: whether the stage's backward is split.
    """

    def __init__(
        self, layers: nn.Sequential, tracker: Tracker, sample: Sample, clock: Clock, *, is_first: bool, splits: bool
    ) -> None:
        self._layers, self._device, self._tracker, self._clock = layers, tracker.device, tracker, clock
        self._sample, self._loss, self._is_first = sample, sample.loss, is_first
        # The last layer takes the target, too, if there is no loss function.
        self._takes_target = self._loss is not None and self._loss.function is None
        others = [*[0] * (len(layers) - 1), int(self._takes_target)]
        self._in_order = [
            Layer(layer, number, name, sample.tuples.keeps_whole(layer, more))
            for number, ((name, layer), more) in enumerate(zip(named_layers(layers), others, strict=True))
        ]
        self._target: Any = None
        layers.zero_grad(set_to_none=True)
        self._weight_store = WeightGradientStore({})
        # Without aliases nothing is deferred, and the first half is all of a backward.
        self._aliases = Aliases(layers if splits else (), self._weight_store)
        self._has_halves = self._aliases.any_deferrable

    def measure(self, value: Any, seconds: float | None, *, is_last: bool, moves: bool) -> tuple[Measured, Any]:
        """Runs the stage repeatedly; returns the measurement, and the input of the next stage, if there is one.

        Args:
            value: the input.
            seconds: for measuring times; None: they are not measured, and those of all actions are 1 or 0.
            is_last: whether no stage gets the output.
            moves: see `measure_stages`.
        """
        # As a worker's, a backward runs on the thread that calls it.
        with self._aliases.standing_in(), torch.autograd.set_multithreading_enabled(False):
            # The first pass allocates, and shows which weight gradients can be delayed.
            buffers = MutableBuffers([*self._layers])
            before = buffers.snapshot()
            output = self._timed_pass(value)[0]
            message = sum(tensor.nbytes for tensor in tensors_of(output))
            output = None if is_last else cut(output, self._device)  # the graph of a pass does not outlive it
            clones = sum(in_blocks(tensor.nbytes, self._device) for tensor in buffers.learn(before).tensors)
            found = replace(self._bytes(value), message=message, clones=clones)
            if moves:
                found = self._with_moves(found, value)
            times = [(1.0, 1.0, float(self._has_halves))]
            if seconds is not None:
                end = time.perf_counter() + seconds
                times = [self._timed_pass(value)[1]]
                while time.perf_counter() < end:
                    times.append(self._timed_pass(value)[1])
        return Measured(LayerSeconds.median(times), found), output

    def _timed_pass(self, value: Any) -> tuple[Any, tuple[float, float, float]]:
        """The output, and the seconds of a forward, of its backward (or the first half), and of the second half."""
        given = self._fresh(value)
        with self._clock() as read:
            times = [read()]
            output = self._forward(given)
            times.append(read())
            ends = self._ends(output)
            self._first_half(ends, [_ones(end) for end in ends])
            times.append(read())
            self._weight_store.add_weight_gradients(0, again=False)
            times.append(read() if self._has_halves else times[-1])
        self._layers.zero_grad(set_to_none=False)
        self._tracker.next_pass()
        forward, first, second = (later - earlier for earlier, later in pairwise(times))
        return output, (forward, first, second)

    def _bytes(self, value: Any) -> ActionBytes:
        """What each action needs, in two passes: the first makes the parameters' gradients, the second adds to them."""
        self._layers.zero_grad(set_to_none=True)
        first, later = self._counted_pass(value), self._counted_pass(value)
        backward, weight = (first.backward[0], later.backward[0]), (first.weight[0], later.weight[0])
        # In the first pass, gradients that I makes are no part of what waits for W.
        return replace(first, backward=backward, weight=weight, waiting=later.waiting)

    def _with_moves(self, found: ActionBytes, value: Any) -> ActionBytes:
        """With what an `O` would move after a forward, by the rule of the runtime."""
        given, saved = self._fresh(value), SavedTensors(self._device)
        with saved.saving():
            output = self._forward(given)

        def moving() -> tuple[int, ...]:
            memories = (each.storage for each in saved.moving())
            return tuple([in_blocks(each.nbytes(), self._device) for each in memories if each is not None])

        before = moving()
        roots = [get_gradient_edge(tensor) for tensor in self._ends(output)]  # the graph stays
        del output
        popped = dict(self._tracker.popped)
        list(self._tracker.let_go())
        after = moving()
        del given, roots, popped
        return replace(found, moved=before, moved_alone=after)

    def _counted_pass(self, value: Any) -> ActionBytes:
        parameters = list(self._layers.parameters())
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        # A meter for each pass: Python may free during this one what cycles of objects have held since the last.
        meter = StorageMeter(self._device, [*parameters, *gradients, *self._layers.buffers()])
        saved: set[int | None] = set()
        with meter:
            given = self._fresh(value)
            start = meter.begin()
            inputs = tensors_of(given)
            of_inputs = {memory_key(each): each.nbytes for each in inputs}
            with _noting(saved):
                output = self._forward(given)
            target = sum(each.nbytes for each in tensors_of(self._target) if memory_key(each) in saved)
            popped = dict(self._tracker.popped)
            start += sum(tensor.nbytes for tensor in popped.values())  # which arrive before, like the input
            forward, kept_with_output = _need(meter, start), meter.live - start
            ends = self._ends(output)
            there = meter.live
            seeds = [torch.ones_like(tensor) for tensor in ends]
            roots = [get_gradient_edge(tensor) for tensor in ends]
            of_seeds = meter.live - there
            del output, ends
            there, stashed = meter.live, {}
            for key, size in self._tracker.let_go():
                stashed[key] = size, there - meter.live
                there = meter.live
            kept = there - of_seeds - start
            kept_with_output -= sum(alone for _, alone in stashed.values())
            there = meter.begin()
            self._first_half(roots, seeds)
            backward = _need(meter, there)
            returned = sum(map(_gradient_bytes, inputs))
            returned_skips = {key: (tensor.nbytes, _gradient_bytes(tensor)) for key, tensor in popped.items()}
            stored = self._weight_store.kept(0)
            input_waits = sum(of_inputs.get(key, 0) for key in set(map(memory_key, stored)))
            del given, inputs, popped, seeds, roots, stored
            self._target = None
            waiting = meter.live - input_waits
            there = meter.begin()
            self._weight_store.add_weight_gradients(0, again=False)
            weight = _need(meter, there)
        return ActionBytes(
            given=sum(of_inputs.values()),
            forward=forward,
            kept=kept,
            kept_with_output=kept_with_output,
            backward=(backward, backward),
            returned=returned,
            waiting=waiting,
            input_waits=input_waits,
            weight=(weight, weight),
            gradients=meter.live,
            target=target,
            saves_input=not saved.isdisjoint(of_inputs),
            stashed=stashed,
            popped=returned_skips,
        )

    def _forward(self, given: Any) -> Any:
        self._weight_store.begin(0)
        target = (self._target,) if self._takes_target else ()
        with skip_tracker.using(self._tracker):
            output = run_layers(self._in_order, entered(given), is_call=self._is_first, target=target)
        if self._loss is not None:
            function = self._loss.function
            output = self._loss.part(output if function is None else function(output, self._target), 0)
        self._weight_store.end()
        return output

    def _first_half(self, roots: Sequence[Any], seeds: Sequence[Tensor]) -> None:
        def backward() -> None:
            if roots:
                torch_private.run_backward(tuple(roots), tuple(seeds), False)

        self._weight_store.differentiate(0, backward)

    def _fresh(self, value: Any) -> Any:
        """Copies of the stage's input for one pass, which may overwrite them."""
        self._target = None if self._loss is None else cut(self._sample.target, self._device)
        return cut(value, self._device)

    def _ends(self, output: Any) -> list[Tensor]:
        """Where a backward begins."""
        tensors = (*tensors_of(output), *self._tracker.stashed.values())
        return [tensor for tensor in tensors if tensor is not None and tensor.requires_grad]


class Tracker:
    """Keeps stashed tensors: for later stages detached from their graph, within a stage as they are.

    Attributes:
        stashed: in this pass, by key.
        popped: likewise.
        device: of the stage that runs.
    """

    def __init__(self) -> None:
        self._from_before: dict[Hashable, Tensor | None] = {}
        self.stashed: dict[Hashable, Tensor | None] = {}
        self.popped: dict[Hashable, Tensor] = {}
        self.device = torch.device("cpu")

    def save(self, key: Hashable, tensor: Tensor | None, poppers: int) -> None:
        """See `SkipTracker.save`."""
        self.stashed[key] = tensor

    def load(self, key: Hashable) -> Tensor | None:
        """See `SkipTracker.load`."""
        if key in self.stashed:
            return self.stashed[key]
        tensor = self._from_before[key]
        if tensor is None:
            return None
        self.popped[key] = leaf = cut(tensor, self.device)
        return entered(leaf)  # type: ignore[no-any-return]

    def next_pass(self) -> None:
        """Ends a pass, whose stashed tensors later stages pop, if no other pass of the stage follows."""
        for key, tensor in self.stashed.items():
            self._from_before[key] = None if tensor is None else tensor.detach().requires_grad_(tensor.requires_grad)
        self.stashed, self.popped = {}, {}

    def let_go(self) -> Iterator[tuple[Hashable, int]]:
        """Ends a pass whose tensors are not kept: drops one stashed tensor after the other, gives its key and size."""
        self.popped = {}
        while self.stashed:
            key, tensor = self.stashed.popitem()
            size = 0 if tensor is None else tensor.nbytes
            del tensor
            yield key, size


def _noting(saved: set[int | None]) -> saved_tensors_hooks:
    """A context that notes the memory of what autograd saves."""

    def pack(tensor: Tensor) -> Tensor:
        saved.add(memory_key(tensor))
        return tensor.detach()  # an output that held its own graph would never be freed

    return saved_tensors_hooks(pack, _unchanged)


def _unchanged(tensor: Tensor) -> Tensor:
    return tensor


# Else products and convolutions would not be split here, as they are in a step, and nothing of them would wait.
_unchanged.may_be_called_twice = True  # type: ignore[attr-defined]


def _gradient_bytes(tensor: Tensor) -> int:
    return 0 if tensor.grad is None else tensor.grad.nbytes


def _need(meter: StorageMeter, before: int) -> Need:
    return Need(max(0, meter.peak - before), max(0, meter.mean - before))


def _ones(end: Tensor) -> Tensor:
    """Ones without memory of their own, since a sample may be as large as memory allows; rates count bytes on meta."""
    return torch.ones_like(end) if end.is_meta else torch.ones((), dtype=end.dtype, device=end.device).expand_as(end)


# ---- a run that leaves no trace --------------------------------------------------------------------------------------


def cut(value: Any, device: torch.device) -> Any:
    """The same value with copies of its tensors as leaves: detached from their graph, with memory of their own."""
    tensors, structure = nested.flatten(value)
    leaves = tuple([tensor.detach().to(device, copy=True).requires_grad_(tensor.requires_grad) for tensor in tensors])
    return nested.unflatten(leaves, structure)


def entered(value: Any) -> Any:
    """The value as input of a layer: not leaves, since the layer may begin with an in-place operation."""
    tensors, structure = nested.flatten(value)
    return nested.unflatten(tuple(map(boundary.enter, tensors)), structure)


def tensors_of(value: Any) -> list[Tensor]:
    """All tensors in a nested value, each once."""
    return list(nested.flatten(value)[0])


def now(device: torch.device) -> float:
    """The time in seconds, after the device has finished all queued work."""
    if is_accelerator(device):
        torch.accelerator.synchronize(device)
    return time.perf_counter()


def _clock_of(device: torch.device) -> AbstractContextManager[Callable[[], float]]:
    return nullcontext(functools.partial(now, device))


@contextmanager
def traceless(device: torch.device, cpu_workers: int = 1) -> Iterator[None]:
    """Enables gradients, and uses the threads that each of so many CPU workers has.

    Afterwards the number of threads and the random states of Python, of the CPU and of the device are as before.
    """
    of_python, threads = random.getstate(), torch.get_num_threads()
    generators = torch.get_device_module(device) if is_accelerator(device) else None
    which = () if device.type == "mps" else (device,)  # there is one MPS device, and it takes no argument
    of_device = None if generators is None else generators.get_rng_state(*which)
    if device.type == "cpu":
        torch.set_num_threads(max(1, threads // max(1, cpu_workers)))  # there may be none
    try:
        with torch.inference_mode(False), torch.enable_grad(), torch.random.fork_rng(devices=[]):
            yield
    finally:
        torch.set_num_threads(threads)
        random.setstate(of_python)
        if generators is not None:
            generators.set_rng_state(of_device, *which)
