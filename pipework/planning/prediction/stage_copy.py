"""A copy of a stage, which runs one micro-batch as the stage will, and shows how long that takes and what it holds."""

from __future__ import annotations

import copy
import functools
import statistics
import time
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from pipework import torch_private
from pipework.autograd.aliases import Aliases
from pipework.autograd.weight_split.store import WeightGradientStore
from pipework.model.sequential import TupleRule
from pipework.planning.balance.sandbox import cut, entered, now, tensors_of
from pipework.planning.prediction.storage_meter import StorageMeter
from pipework.runtime.skips import skip_tracker
from pipework.runtime.stage.memory_meter import MemoryMeter
from pipework.runtime.stage.recomputation import MutableBuffers

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterator, Mapping

    from pipework.runtime.stage.loss import InnerLoss


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
        forward: F or R.
        kept: what the graph holds after it, beside the input; with `kept_with_output` and the output.
        kept_with_output: see `kept`.
        backward: B or I; the gradient of the output is there before.
        returned: the gradient of the input.
        waiting: what is kept between I and W, beside the input; `waits_for_input` says whether that is kept, too.
        waits_for_input: see `waiting`.
        weight: W.
        gradients: of the parameters.
        clones: of buffers, which a checkpointed forward keeps.
        saves_input: whether the graph needs the input.
        stashed: by skip, its tensor, and how much of that no graph of this stage holds.
        popped: by skip, the gradient of its tensor, which goes back to the stage that stashed it.
    """

    given: int
    forward: Need
    kept: int
    kept_with_output: int
    backward: tuple[Need, Need]
    returned: int
    waiting: int
    waits_for_input: bool
    weight: tuple[Need, Need]
    gradients: int
    clones: int = 0
    saves_input: bool = True
    stashed: Mapping[Hashable, tuple[int, int]] = field(default_factory=dict)
    popped: Mapping[Hashable, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Measured:
    """One micro-batch on one stage: seconds and bytes. A backward that is not split has no second half."""

    forward: float
    first_half: float
    second_half: float
    activation: int
    checkpoint: int
    waiting: int
    message: int
    actions: ActionBytes


class StageCopy:
    """A copy of a stage; it runs a micro-batch as the stage will."""

    def __init__(
        self,
        partition: nn.Sequential,
        device: torch.device,
        tracker: Tracker,
        sample: Sample | None,
        *,
        tuples: TupleRule,
        splits: bool,
    ) -> None:
        self._tuples = tuples
        self._layers = [layer.to(device) for layer in copy.deepcopy(partition)]
        for layer in self._layers:
            layer.zero_grad(set_to_none=True)
        self._device = device
        self._tracker = tracker
        tracker.device = device
        self._sample = sample
        self._target: Any = None
        self._weight_store = WeightGradientStore({}) if splits else None
        self._aliases = Aliases(self._layers if splits else (), self._weight_store)
        if not self._aliases.any_deferrable:
            self._weight_store = None

    def measure(self, value: Any, timeout: float | None) -> tuple[Measured, Any]:
        """Runs the stage repeatedly; returns the measurement, and the input of the next stage.

        Args:
            value: the input.
            timeout: seconds for measuring times; None: they are not measured, and those of all actions are 1 or 0.
        """
        end = time.perf_counter() + (timeout or 0)
        # As a worker's, a backward runs on the thread that calls it.
        with self._aliases.standing_in(), torch.autograd.set_multithreading_enabled(False):
            if self._weight_store is not None:
                self._time(self._fresh(value))  # the first pass shows which weight gradients can be delayed
            actions = replace(self._actions(value), saves_input=self._saves_input(self._fresh(value)))
            held, kept, clones, waiting, output = self._count(self._fresh(value))
            times = [(1.0, 1.0, float(self._weight_store is not None))]
            if timeout is not None:
                times = [self._time(self._fresh(value))]
                while time.perf_counter() < end:
                    times.append(self._time(self._fresh(value)))
        self._tracker.next_stage()
        forward, first_half, second_half = (statistics.median(column) for column in zip(*times, strict=True))
        sent = sum(tensor.nbytes for tensor in tensors_of(output))
        result = Measured(forward, first_half, second_half, held, kept, waiting, sent, replace(actions, clones=clones))
        return result, cut(output, self._device)

    def _count(self, given: Any) -> tuple[int, int, int, int, Any]:
        """The bytes that a micro-batch holds without and with checkpointing, of clones, between halves; the output."""
        meter = MemoryMeter(tensor for layer in self._layers for tensor in (*layer.parameters(), *layer.buffers()))
        buffers = MutableBuffers(self._layers)
        before = buffers.snapshot()
        inputs = _inputs(given)
        with meter.measuring(0, 0, inputs, tensors_of(self._target)) as came:
            output = self._forward(given)
            came(self._tracker.popped)  # what other stages have stashed is an input, too
        clones = sum(tensor.nbytes for tensor in buffers.learn(before).tensors)
        kept = clones + sum(tensor.nbytes for tensor in (*inputs, *self._tracker.popped))
        held = meter.read(0, 0)[1]
        self._first_half(lambda: self._backward(output))
        waiting = 0
        if self._weight_store is not None:
            meter.waiting(0, 0, self._weight_store.kept(0))
            waiting = meter.read(0, 0)[1]
        self._second_half()
        self._end_pass()
        return held, kept, clones, waiting, output

    def _saves_input(self, given: Any) -> bool:
        """Whether a forward saves a tensor that it was given for the backward."""
        saved: set[int] = set()

        def pack(tensor: Tensor) -> Tensor:
            saved.add(torch_private.storage_key(tensor.untyped_storage()))
            return tensor.detach()  # an output that held its own graph would never be freed

        inputs = _inputs(given)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            output = self._forward(given)
        found = any(torch_private.storage_key(each.untyped_storage()) in saved for each in inputs)
        self._first_half(lambda: self._backward(output))
        self._second_half()
        self._end_pass()
        return found

    def _actions(self, value: Any) -> ActionBytes:
        """What each action needs, in two passes: the first makes the parameters' gradients, the second adds to them."""
        for layer in self._layers:
            layer.zero_grad(set_to_none=True)
        tensors = [tensor for layer in self._layers for tensor in (*layer.parameters(), *layer.buffers())]
        meter = StorageMeter(self._device, tensors)
        first, later = self._pass(value, meter), self._pass(value, meter)
        gradients = meter.live
        return replace(
            first,
            backward=(first.backward[0], later.backward[0]),
            weight=(first.weight[0], later.weight[0]),
            waiting=later.waiting,
            waits_for_input=later.waits_for_input,
            gradients=gradients,
        )

    def _pass(self, value: Any, meter: StorageMeter) -> ActionBytes:
        before = meter.live
        with meter:
            given = self._fresh(value)
            start = meter.begin()
            inputs = _inputs(given)
            of_inputs = {torch_private.storage_key(each.untyped_storage()): each.nbytes for each in inputs}
            output = self._forward(given)
            popped = dict(self._tracker.popped_by_key)
            # They arrive before, like the input.
            start += sum(tensor.nbytes for tensor in popped.values())
            forward, kept_with_output = _need(meter, start), meter.live - start
            ends = self._ends(output)
            there = meter.live
            seeds = tuple([torch.ones_like(tensor) for tensor in ends])
            roots = tuple([get_gradient_edge(tensor) for tensor in ends])
            of_seeds = meter.live - there
            del output, ends
            there, stashed = meter.live, {}
            for key, size in self._tracker.let_go():
                stashed[key] = size, there - meter.live
                there = meter.live
            kept = there - of_seeds - start
            kept_with_output -= sum(alone for _, alone in stashed.values())
            there = meter.begin()
            self._first_half(functools.partial(_run_backward, roots, seeds))
            backward = _need(meter, there)
            returned = sum(_gradient_bytes(tensor) for tensor in inputs)
            returned_skips = {key: _gradient_bytes(tensor) for key, tensor in popped.items()}
            stored = () if self._weight_store is None else self._weight_store.kept(0)
            waits_for = sum(
                of_inputs.get(key, 0)
                for key in {torch_private.storage_key(tensor.untyped_storage()) for tensor in stored}
            )
            del given, inputs, popped, seeds, roots, stored
            self._target = None
            waiting = meter.live - before - waits_for
            there = meter.begin()
            self._second_half()
            weight = _need(meter, there)
        return ActionBytes(
            given=sum(of_inputs.values()),
            forward=forward,
            kept=kept,
            kept_with_output=kept_with_output,
            backward=(backward, backward),
            returned=returned,
            waiting=waiting,
            waits_for_input=waits_for > 0,
            weight=(weight, weight),
            gradients=0,
            stashed=stashed,
            popped=returned_skips,
        )

    def _time(self, given: Any) -> tuple[float, float, float]:
        """The seconds of a forward, of its backward (or the first half of it), and of the second half."""
        begin = now(self._device)
        output = self._forward(given)
        middle = now(self._device)
        self._first_half(lambda: self._backward(output))
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

    def _first_half(self, backward: Callable[[], None]) -> None:
        if self._weight_store is None:
            backward()
        else:
            self._weight_store.differentiate(0, backward)

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

    def _ends(self, output: Any) -> list[Tensor]:
        """Where a backward begins."""
        return [tensor for tensor in (*tensors_of(output), *self._tracker.stashed) if tensor.requires_grad]

    def _backward(self, output: Any) -> None:
        ends = self._ends(output)
        if ends:
            torch.autograd.backward(ends, [torch.ones_like(tensor) for tensor in ends])

    def _end_pass(self) -> None:
        for layer in self._layers:
            layer.zero_grad(set_to_none=False)
        self._tracker.next_pass()


class Tracker:
    """Keeps stashed tensors: for later stages detached from their graph, within a stage as they are."""

    def __init__(self) -> None:
        self._from_before: dict[Hashable, Tensor | None] = {}
        self._last: dict[Hashable, Tensor | None] = {}
        self._of_this_stage: dict[Hashable, Tensor | None] = {}
        self.popped_by_key: dict[Hashable, Tensor] = {}
        self.device = torch.device("cpu")  # of the stage that runs

    @property
    def popped(self) -> list[Tensor]:
        """The tensors popped in this pass."""
        return list(self.popped_by_key.values())

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
        self.popped_by_key[key] = leaf = cut(tensor, self.device)
        return entered(leaf)  # type: ignore[no-any-return]

    def next_pass(self) -> None:
        """Prepares for another pass of the same stage."""
        self._last, self._of_this_stage, self.popped_by_key = self._of_this_stage, {}, {}

    def let_go(self) -> Iterator[tuple[Hashable, int]]:
        """As `next_pass`, but keeps nothing: drops one stashed tensor after the other, and gives its key and size."""
        self._last, self.popped_by_key = {}, {}
        while self._of_this_stage:
            key, tensor = self._of_this_stage.popitem()
            size = 0 if tensor is None else tensor.nbytes
            del tensor
            yield key, size

    def next_stage(self) -> None:
        """Prepares for the next stage."""
        for key, tensor in self._last.items():
            self._from_before[key] = None if tensor is None else tensor.detach().requires_grad_(tensor.requires_grad)
        self._last = {}


def _inputs(given: Any) -> list[Tensor]:
    """The tensors of a stage's input."""
    return tensors_of((given.arguments, given.keywords) if isinstance(given, Sample) else given)


def _gradient_bytes(tensor: Tensor) -> int:
    return 0 if tensor.grad is None else tensor.grad.nbytes


def _need(meter: StorageMeter, before: int) -> Need:
    return Need(max(0, meter.peak - before), max(0, meter.mean - before))


def _run_backward(roots: tuple[GradientEdge, ...], seeds: tuple[Tensor, ...]) -> None:
    if roots:
        torch_private.run_backward(roots, seeds, False)
