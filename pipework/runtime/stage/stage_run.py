"""One mini-batch on one stage: the functions of its F, R, B, I and W actions.

A `Stage` lives as long as its pipe. A `StageRun` holds the tensors of one mini-batch between its actions:

    F  receive -> leaves -> layers -> outputs -> send, cut from the graph          keeps leaves and graph roots
       (checkpointed: the graph is dropped at once)                                 keeps leaves only
    R  leaves -> layers again                                                       now keeps graph roots, too
    B  receive gradients -> autograd from the roots -> leaves -> send               keeps nothing
    I  as B, without the deferred gradients of parameters                          keeps what these need
    W  the deferred gradients (see `weight_split.store`)                           keeps nothing

Parameter gradients are added up in the alias leaves (see `aliases`), in the order of the B actions.
"""

from __future__ import annotations

import contextlib
import functools
from typing import TYPE_CHECKING, Any, TypeAlias

from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, get_gradient_edge

from pipework import torch_private
from pipework.autograd import boundary, hidden_parameters
from pipework.autograd.aliases import Aliases
from pipework.autograd.shared_memory import SharedMemory
from pipework.autograd.stray_gradients import explain_freed_graph
from pipework.autograd.weight_split.store import WeightGradientStore
from pipework.runtime.failure import add_note
from pipework.runtime.random.streams import function_may_draw, may_draw
from pipework.runtime.skips import skip_tracker
from pipework.runtime.skips.connections import Bundle, SkipPorts
from pipework.runtime.skips.stashed import Arrived, Stashed, arrived_tensors
from pipework.runtime.stage.finite import refuse_non_finite
from pipework.runtime.stage.in_place import InPlaceChanges
from pipework.runtime.stage.loss_run import LossRun
from pipework.runtime.stage.recompute_check import RecomputeCheck
from pipework.runtime.stage.recompute_phase import checkpointing, recomputing
from pipework.runtime.stage.returned import layer_text, note_returned
from pipework.runtime.stage.untrainable import refuse_untrainable
from pipework.values import nested

_cut = boundary.cut

if TYPE_CHECKING:
    from collections.abc import Callable, Set

    from pipework.autograd.batch_versions import BatchVersions
    from pipework.autograd.tied_gradients import TiedGradients
    from pipework.runtime.caller_context import CallerContext
    from pipework.runtime.random.streams import RandomStream
    from pipework.runtime.random.unseen_draws import Hold
    from pipework.runtime.stage.buffers import Snapshot
    from pipework.runtime.stage.loss import InnerLoss
    from pipework.runtime.stage.memory_meter import MemoryMeter
    from pipework.runtime.stage.stage import Stage
    from pipework.runtime.transport import Endpoint
    from pipework.schedule import Action

    Root: TypeAlias = Tensor | GradientEdge | None  # where a backward starts; None: the output needs none
    # The structure of a value: a Structure, None for a single tensor, a Bundle if the stage has skips.
    Around: TypeAlias = Any


class StageRun:
    """One stage's part in one mini-batch. All actions of a stage are executed by one worker, one after the other."""

    def __init__(
        self,
        stage: Stage,
        context: CallerContext,
        checkpointed: Set[int],
        *,
        own_leaves: frozenset[int],
        sends_gradients: bool,
        check_finite: bool,
        splits: bool = False,
        loss: InnerLoss | None = None,
        batch: BatchVersions | None = None,
    ) -> None:
        self._stage = stage
        self._check_finite = check_finite
        self._index = stage.index
        self._layers = stage.layers
        self._context = context
        self._grad = context.grad
        self._checkpointed = checkpointed if context.grad and stage.training else frozenset[int]()
        if stage.doubtful and context.grad:
            refuse_untrainable(stage.doubtful, recomputes=bool(self._checkpointed))
        self._inputs: dict[int, tuple[tuple[Tensor, ...], Around, Snapshot, list[int]]] = {}
        self._graphs: dict[int, tuple[tuple[Tensor, ...], tuple[Root, ...]]] = {}
        self._in_place = InPlaceChanges(stage, own_leaves if stage.index == 0 else frozenset(), batch)
        self._recompute_check = RecomputeCheck(stage.recompute_looks)
        self._sends_gradients = sends_gradients
        self._inspected = False  # whether a graph has been searched for hidden parameters
        if loss is not None and loss.function is None:  # the last layer takes the target, too
            self._layers = stage.layers_with_target
        stage.refresh()
        self.draws = any(map(may_draw, stage.modules)) or (loss is not None and function_may_draw(loss.function))
        self._stray = stage.stray_gradients() if context.grad else None
        new_queue = list if self._stray is None else self._stray.new_queue
        self._weight_store = WeightGradientStore(stage.deferred, new_queue) if splits and context.grad else None
        self.sharded = stage.fully_sharded()
        modules = stage.modules if context.grad else ()
        self.aliases = Aliases(modules, self._weight_store, self._stray, self.sharded)
        if self.aliases.dtensor is not None and self.sharded is None:
            self.sharded = stage.fully_sharded(looks_again=True)
            if self.sharded is not None:
                self.aliases = Aliases(modules, self._weight_store, self._stray, self.sharded)
        if not self.aliases.any_deferrable:
            self._weight_store = None
        self._loss = None if loss is None else LossRun(loss, stage, trains=bool(self.aliases.leaves))
        self._takes_target = -1 if self._loss is None else self._loss.taker
        self._parameter_versions = self.aliases.versions
        self.meter: MemoryMeter | None = None
        self.tied: TiedGradients | None = None
        # Where the backward of an output starts. The next stage or the loss keeps an output's memory in any case: then
        # the output itself, which is cheaper than its edge.
        self._root = _itself if stage.shares_output or loss is not None else _edge
        self._ports = ports = SkipPorts(stage.index, stage.skips) if stage.skips else None
        self._passes = ports if ports is not None and ports.may_be_passed else None
        self._skips = ports if ports is not None and ports.touched else None
        self._gets_gradients = self._skips or self._passes  # of skips that others pop
        self._entered: tuple[Root, ...] = ()  # the popped tensors to whose gradients later stages add first
        self._stashed = stage.stashed

    def connect(
        self,
        endpoint: Endpoint,
        *,
        stream: RandomStream | None,
        hold: Hold | None = None,
        started: Callable[[], None] | None = None,
        retain_graph: bool = False,
        context_entered: bool = False,
    ) -> None:
        """Prepares for one run of the worker.

        Args:
            endpoint: the worker's side of the transport.
            stream: the source of the worker's random numbers; None: the layers draw none.
            hold: entered by each action that may draw from the generator of an accelerator unseen, if given.
            started: called when an action has received its inputs and begins to compute, if given.
            retain_graph: whether the B actions leave their graphs for another run.
            context_entered: whether the caller's settings for the layers are in force during the whole run.
        """
        self._receive_input = endpoint.receiver("F", self._index)
        self._receive_gradient = endpoint.receiver("B", self._index)
        self._receive_target = endpoint.receiver("target", self._index)
        self._context_entered = context_entered
        self._send_output = endpoint.sender("F", self._index + 1)
        self._send_gradient = endpoint.sender("B", self._index - 1) if self._sends_gradients else None
        self._enter_stream = None if stream is None else stream.enter
        self._hold = hold
        if self._gets_gradients is not None:
            self._gets_gradients.connect(endpoint)
        self._memory = SharedMemory(self.aliases.leaves)
        self._watched = not (self.meter is None and self._hold is None and self._skips is None)
        self._started = started
        self._retain_graph = retain_graph
        self._run_backward = torch_private.run_backward
        self._add_weight_gradients = None if self._weight_store is None else self._weight_store.add_weight_gradients
        if context_entered and self._context.autocasts:
            self._run_backward = functools.partial(_without_autocast, self._context, self._run_backward)
            if self._add_weight_gradients is not None:
                self._add_weight_gradients = functools.partial(
                    _without_autocast, self._context, self._add_weight_gradients
                )
        self._has_end = self._weight_store is not None or self.meter is not None or self.sharded is not None
        self._has_extras = (
            not self._grad
            or self._watched
            or self._check_finite
            or started is not None
            or retain_graph
            or self._ports is not None
            or self._weight_store is not None
            or self._stray is not None
            or self.tied is not None
            or self.sharded is not None
        )
        self._is_plain = False

    def disconnect(self) -> None:
        """After a run: drops the `started` callback, which refers to this object."""
        self._started = None
        if self._weight_store is not None:
            self._weight_store.learn(self.aliases.parameters, self.aliases.leaves)

    def forward(self, action: Action) -> None:
        """F: computes the stage's output for one micro-batch and sends it on."""
        micro_batch, loss = action[2], self._loss
        leaves, structure = self._receive_input(micro_batch)
        if loss is not None:
            loss.receive(micro_batch, self._receive_target(micro_batch))
        if self._is_plain and micro_batch not in self._checkpointed:
            outputs, structure = self._run_layers(leaves, leaves, structure, micro_batch)
            self._graphs[micro_batch] = leaves, tuple(map(self._root, outputs))
            if loss is not None:
                del loss.targets[micro_batch]
            self._send_output(micro_batch, (tuple(map(_cut, outputs)), structure))
            return
        arrived: list[Arrived] = []
        if self._ports is not None:
            leaves, structure, arrived = self._receive_skips(self._ports, micro_batch, leaves, structure)
        if self._started is not None:
            self._started()
        if micro_batch in self._checkpointed:
            outputs, structure = self._first_pass(leaves, structure, micro_batch, arrived)
        else:
            outputs, structure = self._compute(leaves, structure, micro_batch)
            if self._grad:
                self._keep_graph(micro_batch, leaves, outputs)
            if loss is not None:
                del loss.targets[micro_batch]
        if self._check_finite:
            refuse_non_finite(outputs, f"an output of stage {self._index}")
        if arrived:
            self._stashed.refuse_overwritten(arrived)
        # What is sent has no graph, and this frame must not keep the graph either.
        of_parameters = list(map(self.aliases.has_memory_of, outputs))
        outputs = tuple(map(_cut, outputs))
        for output, refuses in zip(outputs, of_parameters, strict=True):
            if refuses:
                boundary.mark_unchangeable(output)
        if self._in_place.refuses:
            self._in_place.mark(outputs)
        if loss is not None:
            loss.note_form(outputs[0])
        if self.meter is not None:
            self.meter.sending(outputs)
        if self._ports is not None:
            outputs, structure = self._send_skips(micro_batch, outputs, structure, arrived)
        self._send_output(micro_batch, (outputs, structure))
        # The first micro-batch has shown whether inputs are changed in place, and that no parameter is hidden.
        self._is_plain = not self._has_extras and self._in_place.found is False and self._inspected

    def _receive_skips(
        self, ports: SkipPorts, micro_batch: int, leaves: tuple[Tensor, ...], structure: Around
    ) -> tuple[tuple[Tensor, ...], Around, list[Arrived]]:
        """The inputs with what the stage pops, and those of them that were stashed by earlier stages."""
        arrived: list[Arrived] = []
        if isinstance(structure, Stashed):
            if structure.same:
                ports.note_same(micro_batch, structure.same)
            arrived, structure = arrived_tensors(leaves, structure), structure.structure
        if self._skips is not None:
            leaves, structure = self._skips.receive(micro_batch, leaves, structure)
            own, popped = structure.own, self._skips.popped(structure.present)
            arrived += self._stashed.popped(own, leaves[own:], popped)
        return leaves, structure, arrived

    def _send_skips(
        self, micro_batch: int, outputs: tuple[Tensor, ...], structure: Around, arrived: list[Arrived]
    ) -> tuple[tuple[Tensor, ...], Around]:
        """Sends what the stage stashes. Returns the value, and its structure with marks for stashed tensors."""
        if self._skips is not None:
            structure, own, present, same = bundle = structure
            self._skips.send(micro_batch, outputs[own:], bundle)
            outputs, own_stashed = outputs[:own], self._skips.stashed(outputs[own:], present)
            return outputs, self._stashed.around(structure, outputs, arrived, own_stashed, same)
        if self._passes is not None:
            self._passes.await_gradients(micro_batch)
        if arrived:
            structure = self._stashed.around(structure, outputs, arrived, ())
        return outputs, structure

    def recompute(self, action: Action) -> None:
        """R: computes a checkpointed micro-batch again and keeps the graph. Needs no gradient: it may run early."""
        if self._started is not None:
            self._started()
        micro_batch = action.micro_batch
        if micro_batch not in self._inputs:
            return  # this stage is in evaluation mode: nothing was checkpointed here
        again = self._retain_graph
        leaves, structure, buffers, versions = self._inputs[micro_batch] if again else self._inputs.pop(micro_batch)
        # A stage that changes its input in place has run on copies. The caller's micro-batches share a version counter.
        untouched = self._in_place.found or versions == list(map(_version, leaves))
        if not untouched or self._parameter_versions != self.aliases.versions:
            raise RuntimeError(
                f"an input or a parameter of stage {self._index} has been modified by an inplace operation since its "
                "forward, so it cannot be recomputed for its backward. Call backward() before optimizer.step() and "
                "before the batch's memory is used again, or use checkpoint='never' if autograd need not have them"
            )
        if self._in_place.found:
            leaves = tuple(map(boundary.private_copy, leaves))
        elif again:
            leaves = tuple(map(boundary.renewed, leaves))
        context = contextlib.nullcontext() if self._context_entered else self._context.entered()
        with context, recomputing(), buffers.standing_in(again=again):
            outputs, _ = self._compute(leaves, structure, micro_batch)
            self._recompute_check.compare(micro_batch, outputs, self._stage.place)
            self._keep_graph(micro_batch, leaves, outputs)
        if self._loss is not None:
            self._loss.targets.pop(micro_batch, None)  # it is recomputed once

    def backward(self, action: Action) -> None:
        """B: differentiates one micro-batch, adds to the parameters' gradients, sends the input's gradient."""
        try:
            self._differentiate(action)
            if self._has_end:
                self._end_backward(action[2])
        except RuntimeError as error:
            self._explain(error)
            raise

    def input_gradient(self, action: Action) -> None:
        """I: as B, but defers the gradients of parameters to W where possible."""
        try:
            self._differentiate(action)
        except RuntimeError as error:
            self._explain(error)
            raise
        if self.sharded is not None:
            self.sharded.accumulate(self.aliases.parameters, self.aliases.leaves)
        if self.meter is not None and not self._retain_graph:
            waiting = () if self._weight_store is None else self._weight_store.kept(action.micro_batch)
            self.meter.waiting(self._index, action.micro_batch, waiting)

    def weight_gradient(self, action: Action) -> None:
        """W: computes the deferred gradients, and adds them to the parameters' gradients."""
        if self._started is not None:
            self._started()
        try:
            self._end_backward(action.micro_batch)
        except RuntimeError as error:
            self._explain(error)
            raise

    def _explain(self, error: RuntimeError) -> None:
        """Adds a note to PyTorch's error for a graph that was freed by another backward."""
        text = explain_freed_graph(error, self._stage)
        if text is not None:
            add_note(error, text)

    def _end_backward(self, micro_batch: int) -> None:
        if self._add_weight_gradients is not None:
            self._add_weight_gradients(micro_batch, again=self._retain_graph)
            if self._memory.pending:
                self._memory.separate()
            self._check_parameters()
        if self.sharded is not None:
            self.sharded.accumulate(self.aliases.parameters, self.aliases.leaves)
        if self.meter is not None and not self._retain_graph:
            self.meter.released(self._index, micro_batch)

    def _check_parameters(self) -> None:
        if self._check_finite:
            for name, alias in self.aliases.named(self._layers):
                refuse_non_finite([alias.grad], f"the gradient of parameter {name!r}")

    def _differentiate(self, action: Action) -> None:
        """Runs autograd for one micro-batch, and sends the input's gradient."""
        micro_batch, graphs = action[2], self._graphs
        if self._loss is None:
            gradients = self._receive_gradient(micro_batch)[0]
        else:  # the gradient of the loss is its scale
            of_losses, count = self._loss.seeds, len(graphs[micro_batch][1])
            # The usual case without a call.
            gradients = (of_losses.pop(),) if of_losses and count == 1 else self._loss.gradients(count)
        if not self._has_extras:
            leaves, roots = graphs.pop(micro_batch)
            starts, seeds = _differentiable(roots, gradients)
            if self._enter_stream is not None:
                self._enter_stream(-1 - self._index, micro_batch)
            of_leaves: tuple[Tensor | None, ...] = (None,) * len(leaves)
            if starts:
                of_leaves = boundary.gradients(leaves, self._run_backward, starts, seeds, False)
                if self._memory.pending:
                    self._memory.separate()
            if self._send_gradient is not None:
                self._send_gradient(micro_batch, (of_leaves, None))
            return
        if self._gets_gradients is not None:
            gradients += self._gets_gradients.receive_gradients(micro_batch)
        if self._started is not None:
            self._started()
        leaves, roots = graphs[micro_batch] if self._retain_graph else graphs.pop(micro_batch)
        starts, seeds = _differentiable(roots, gradients)
        if self.tied is not None:
            begun = self.tied.begun(micro_batch)
            starts += tuple([alias for alias, _ in begun])
            seeds += tuple([gradient for _, gradient in begun])
        if not starts:
            of_leaves = (None,) * len(leaves)
            if self._weight_store is not None:
                self._weight_store.nothing_to_differentiate(micro_batch)
        elif self._hold is None:
            of_leaves = self._gradients(leaves, starts, seeds, micro_batch)
        else:
            with self._hold:
                of_leaves = self._gradients(leaves, starts, seeds, micro_batch)
        if self._check_finite:
            refuse_non_finite(of_leaves, f"the gradient of an input of stage {self._index}")
            self._check_parameters()
        if self.tied is not None:
            SharedMemory(self.aliases.leaves).separate()  # a gradient that is handed on comes anew
            self.tied.hand_on(micro_batch)
        elif self._memory.pending:
            self._memory.separate()
        if self._skips is not None:
            of_leaves = self._skips.send_gradients(micro_batch, of_leaves)
        if self._send_gradient is not None:
            self._send_gradient(micro_batch, (of_leaves, None))

    def _gradients(
        self,
        leaves: tuple[Tensor, ...],
        starts: tuple[Tensor | GradientEdge, ...],
        seeds: tuple[Tensor, ...],
        micro_batch: int,
    ) -> tuple[Tensor | None, ...]:
        if self._enter_stream is not None:
            # A backward may draw random numbers, from a stream of its own.
            self._enter_stream(-1 - self._index, micro_batch)
        if self._weight_store is None:
            return boundary.gradients(leaves, self._run_backward, starts, seeds, self._retain_graph)
        run = functools.partial(self._run_backward, starts, seeds, self._retain_graph)
        return boundary.gradients(leaves, self._weight_store.differentiate, micro_batch, run)

    def awaits(self, name: str, micro_batch: int) -> bool | None:
        """Whether a message of this name will come; see `SkipPorts.awaits`."""
        return True if self._ports is None else self._ports.awaits(name, micro_batch)

    def held(self) -> dict[int, tuple[tuple[Tensor, ...], list[Any], list[Tensor]]]:
        """By micro-batch in flight: its inputs, where its graph begins if there is one, and what waits for its W."""
        store = self._weight_store
        waiting = {} if store is None else {n: kept for n in store.micro_batches if (kept := store.kept(n))}
        held: dict[int, tuple[tuple[Tensor, ...], list[Any], list[Tensor]]] = {}
        for n in sorted({*self._inputs, *self._graphs, *waiting}):
            leaves, roots = self._graphs.get(n, ((), ()))
            if n in self._inputs:
                leaves = (*self._inputs[n][0], *self._inputs[n][2].tensors)
            held[n] = leaves, list(roots), waiting.get(n, [])
        return held

    def clear(self) -> None:
        """Drops every tensor, after a failure: the traceback refers to this object."""
        if self._loss is not None:
            self._loss.clear()
        self._inputs.clear()
        self._graphs.clear()
        self._recompute_check.clear()
        if self._weight_store is not None:
            self._weight_store.clear()
        if self.tied is not None:
            self.tied.clear()
        self.aliases.take_gradients()
        if self.sharded is not None:
            self.sharded.forget()

    def _first_pass(
        self, leaves: tuple[Tensor, ...], structure: Around, micro_batch: int, arrived: list[Arrived]
    ) -> tuple[tuple[Tensor, ...], Around]:
        """Computes a micro-batch of which only the input is kept, not the graph.

        Autograd records a graph: it shows which outputs require a gradient, and a module that reads grad mode does the
        same in both passes. The graph is freed with the outputs; it takes as much memory as that of the recomputation.
        """
        buffers = self._stage.buffers.snapshot()
        target = () if self._loss is None else self._loss.tensors(micro_batch)
        of_target = list(map(_version, target))
        unknown, kept = self._in_place.found is None, list(map(_version, leaves))
        own = self._in_place.inputs_of_first_pass(leaves)
        versions = list(map(_version, own))
        arrived[:] = [each._replace(tensor=own[each.number], version=versions[each.number]) for each in arrived]
        with checkpointing():
            outputs, structure_out = self._compute(own, structure, micro_batch)
            if self._stray is not None:
                self._stray.watch(own)  # a layer may keep a tensor of this graph, too
            if not self._inspected:
                self._inspect(own, outputs)
        self._entered = ()
        if of_target != list(map(_version, target)):
            raise RuntimeError(
                "the loss changed its target in place, and checkpointing needs the target again. Clone it in the loss, "
                "or use checkpoint='never'"
            )
        snapshot = self._stage.buffers.learn(buffers)
        if self._is_frozen(outputs):
            self._graphs[micro_batch] = leaves, (None,) * len(outputs)  # no R: there is nothing to differentiate
        else:
            self._inputs[micro_batch] = leaves, structure, snapshot, kept
            self._recompute_check.keep(micro_batch, outputs)
        if self._in_place.see_first_pass(own, versions, outputs, is_first=unknown):
            self._stashed.refuse_overwritten(arrived)
            self._in_place.refuse_overlap(leaves)
        if self.meter is not None:
            self.meter.checkpointed(self._index, micro_batch, [*leaves, *snapshot.tensors])
        return outputs, structure_out

    def _is_frozen(self, outputs: tuple[Tensor, ...]) -> bool:
        """Whether no gradient will reach this stage for a micro-batch, so that it need not be computed again."""
        if self._loss is not None or self._skips is not None or self._passes:
            return False
        return not any(output.requires_grad for output in outputs)

    def _compute(
        self, leaves: tuple[Tensor, ...], structure: Around, micro_batch: int
    ) -> tuple[tuple[Tensor, ...], Around]:
        """Runs the layers on one micro-batch."""
        store = self._weight_store
        if store is not None:
            store.begin(micro_batch)
        if self._watched:
            result = self._compute_watched(leaves, structure, micro_batch)
        else:
            aliases = (
                leaves if self._in_place.found is False and self._passes is None else self._enter(leaves, micro_batch)
            )
            result = self._run_layers(leaves, aliases, structure, micro_batch)
        if store is not None:
            store.end()
        return result

    def _compute_watched(
        self, leaves: tuple[Tensor, ...], structure: Around, micro_batch: int
    ) -> tuple[tuple[Tensor, ...], Around]:
        with contextlib.ExitStack() as stack:
            if self._hold is not None:
                stack.enter_context(self._hold)
            if self.meter is not None:
                target = () if self._loss is None else self._loss.tensors(micro_batch)
                stack.enter_context(self.meter.measuring(self._index, micro_batch, leaves, target))
            if self._skips is None:
                return self._run_layers(leaves, self._enter(leaves, micro_batch), structure, micro_batch)
            return self._run_layers_with_skips(self._skips, leaves, structure, micro_batch)

    def _run_layers_with_skips(
        self, skips: SkipPorts, leaves: tuple[Tensor, ...], bundle: Bundle, micro_batch: int
    ) -> tuple[tuple[Tensor, ...], Bundle]:
        """Runs the layers of a stage that pops inputs or stashes outputs."""
        value, popped = leaves[: bundle.own], leaves[bundle.own :]
        of_value = self._enter(value, micro_batch)
        aliases = skips.entered(micro_batch, popped, of_value, bundle.present)
        self._entered = tuple(map(_edge, skips.continued(aliases, bundle.present))) + self._entered
        tracker = skips.tracker(aliases, bundle.present)
        with skip_tracker.using(tracker):
            outputs, structure = self._run_layers(value, of_value, bundle.structure, micro_batch)
        # Changes of a tensor that is the value, too, were seen with the value.
        apart = [pair for pair in zip(popped, aliases, strict=True) if not any(pair[1] is each for each in of_value)]
        self._in_place.see([leaf for leaf, _ in apart], [alias for _, alias in apart])
        stashed, bundle = skips.bundle(structure, outputs, tracker)
        return outputs + stashed, bundle

    def _enter(self, leaves: tuple[Tensor, ...], micro_batch: int) -> tuple[Tensor, ...]:
        """What the layers get instead of the value's leaves, also where later stages begin their gradients."""
        aliases = leaves
        if self._in_place.found is not False:
            aliases = self._in_place.aliases(leaves, recomputed=micro_batch in self._checkpointed)
        self._entered = ()
        if self._passes is not None:
            self._entered = tuple([_edge(aliases[number]) for number, _ in self._passes.passed(micro_batch)])
        return aliases

    def _run_layers(
        self, leaves: tuple[Tensor, ...], aliases: tuple[Tensor, ...], structure: Around, micro_batch: int
    ) -> tuple[tuple[Tensor, ...], Around]:
        value = aliases[0] if structure is None else nested.unflatten(aliases, structure)
        loss = self._loss
        if loss is not None and not loss.trains:
            loss.trains = any(leaf.requires_grad for leaf in leaves)
        enter_stream = self._enter_stream
        # The structure in stage 0 has positional and keyword arguments; None, a single tensor, is the usual case.
        has_arguments = structure is not None and self._index == 0
        takes_target = self._takes_target
        for module, number, name, takes_tuple_whole in self._layers:
            if enter_stream is not None:
                enter_stream(number, micro_batch)
            try:
                if type(value) is Tensor and number != takes_target:  # the usual case
                    value = module(value)
                elif has_arguments or number == takes_target:
                    arguments, keywords = value if has_arguments else (_spread(value, takes_tuple_whole), {})
                    if number == takes_target:
                        arguments = (*arguments, self._loss.targets[micro_batch][1])  # type: ignore[union-attr]
                    value, has_arguments = module(*arguments, **keywords), False
                else:
                    value = module(*value) if type(value) is tuple and not takes_tuple_whole else module(value)
            except BaseException as error:
                add_note(error, f"in {layer_text(name, module)}")
                if not has_arguments:
                    note_returned(error, value, self._stage.before(number), layer_text(name, module))
                if number == takes_target and isinstance(error, TypeError):
                    add_note(
                        error,
                        "the pipe has no loss_fn, so the last layer is given the target and returns the loss; "
                        "or give Pipe a loss_fn",
                    )
                raise
        if aliases is not leaves:
            self._in_place.see(leaves, aliases)
        if loss is None:
            if type(value) is Tensor:  # the usual case
                return (value,), None
            try:
                return nested.flatten(value)
            except TypeError as error:
                add_note(error, f"returned by {self._stage.before(self._layers[-1].number + 1)}")
                raise
        return loss.outputs(value, micro_batch, enter_stream, grad=self._grad)

    def _keep_graph(self, micro_batch: int, leaves: tuple[Tensor, ...], outputs: tuple[Tensor, ...]) -> None:
        """Keeps the leaves and the roots of the graph for B, but not the outputs' memory."""
        if not self._inspected:
            self._inspect(leaves, outputs)
        if self._stray is not None:
            self._stray.watch(leaves)
        self._graphs[micro_batch] = leaves, (*map(self._root, outputs), *self._entered)

    def _inspect(self, leaves: tuple[Tensor, ...], outputs: tuple[Tensor, ...]) -> None:
        if not any(output.requires_grad for output in outputs):
            return
        # Once for each situation, since the graph may differ between them.
        situation = (self._loss is None, self._stage.training, len(self.aliases.leaves))
        if situation not in self._stage.inspected:
            hidden_parameters.refuse_hidden_parameters(self._stage, self.aliases, leaves, outputs)
            self._stage.inspected.add(situation)
        self._inspected = True


def _spread(value: Any, takes_tuple_whole: bool) -> tuple[Any, ...]:
    """As `TupleRule.arguments`, without reading the layer's signature again."""
    return value if type(value) is tuple and not takes_tuple_whole else (value,)


def _differentiable(
    roots: tuple[Root, ...], gradients: tuple[Tensor | None, ...]
) -> tuple[tuple[Tensor | GradientEdge, ...], tuple[Tensor, ...]]:
    """The roots of a backward, and their gradients."""
    if len(roots) == 1:  # the usual case
        root, gradient = roots[0], gradients[0]
        return ((), ()) if root is None or gradient is None else ((root,), (gradient,))
    pairs = zip(roots, gradients, strict=True)
    present = [(root, gradient) for root, gradient in pairs if root is not None and gradient is not None]
    return tuple([root for root, _ in present]), tuple([gradient for _, gradient in present])


def _without_autocast(context: CallerContext, run: Callable[..., None], *arguments: Any, **options: Any) -> None:
    """As PyTorch advises for a backward, whole or in halves: autocast would cast its products and sums again."""
    with context.without_autocast():
        run(*arguments, **options)


def _itself(output: Tensor) -> Root:
    return output if output.requires_grad else None


def _edge(output: Tensor) -> Root:
    """The output's edge into the graph, from which a backward can start without keeping the output's memory alive."""
    node = output.grad_fn
    if node is None:
        return _itself(output)
    if node.__class__.__base__ is BackwardCFunction:  # of a function in Python, which an edge alone does not keep alive
        return get_gradient_edge(output)
    return GradientEdge(node, output.output_nr)


def _version(tensor: Tensor) -> int:
    return -1 if tensor.is_inference() else torch_private.version(tensor)
