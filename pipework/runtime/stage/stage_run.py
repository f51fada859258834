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
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

from torch import Tensor

from pipework import torch_private
from pipework.autograd import boundary
from pipework.autograd.aliases import Aliases, SharedMemory
from pipework.autograd.stray_gradients import explain_freed_graph, refuse_hidden_parameters
from pipework.autograd.weight_split.store import WeightGradientStore
from pipework.runtime.failure import add_note
from pipework.runtime.random.streams import function_may_draw, may_draw
from pipework.runtime.skips import skip_tracker
from pipework.runtime.skips.connections import SkipPorts
from pipework.runtime.stage.in_place import InPlaceChanges
from pipework.runtime.stage.kept import Inputs, Kept, edge
from pipework.runtime.stage.layer_errors import layer_text, note_returned, refuse_non_finite, refuse_untrainable
from pipework.runtime.stage.loss import LossRun
from pipework.runtime.stage.recomputation import RecomputeCheck, checkpointing, recomputing
from pipework.values import nested

if TYPE_CHECKING:
    from collections.abc import Callable, Set

    from torch.autograd.graph import GradientEdge

    from pipework.autograd.batch_versions import BatchVersions
    from pipework.autograd.tied_gradients import TiedGradients
    from pipework.runtime.caller_context import CallerContext
    from pipework.runtime.random.streams import RandomStream
    from pipework.runtime.random.unseen_draws import Hold
    from pipework.runtime.skips.connections import Bundle
    from pipework.runtime.skips.stashed import Arrived
    from pipework.runtime.stage.kept import AnyStructure, Root
    from pipework.runtime.stage.loss import InnerLoss
    from pipework.runtime.stage.memory_meter import MemoryMeter
    from pipework.runtime.stage.stage import Stage
    from pipework.runtime.transport import Endpoint
    from pipework.schedule import Action

    LayersResult: TypeAlias = tuple[tuple[Tensor, ...], AnyStructure]
    # Of leaves, the structure around them, and the number of the micro-batch.
    RunLayers: TypeAlias = Callable[[tuple[Tensor, ...], AnyStructure, int], LayersResult]

_cut, _viewed = boundary.cut, torch_private.viewed


class StageRun:
    """One stage's part in one mini-batch. All actions of a stage are executed by one worker, one after the other.

    Args:
        stage: the stage.
        context: the caller's settings.
        checkpointed: the micro-batches that are recomputed.
        own_leaves: see `Step`.
        sends_gradients: whether the gradients of inputs are sent to the stage before, or to the caller.
        check_finite: whether NaN and infinities are errors.
        splits: whether the schedule has I and W for this stage.
        loss: computed after the layers; None: by no or by another stage.
        batch: see `InPlaceChanges`.

    Attributes:
        draws: whether the stage may draw random numbers.
        aliases: of its parameters.
        sharded: the parameters of the stage that FSDP shards; None: it shards none.
        meter: counts bytes; None: nothing does.
        tied: the gradients of parameters that other stages of this process use, too; None: there are none.
    """

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
        self._index = stage.index
        self._context = context
        self._grad = context.grad
        self._checkpointed = checkpointed if context.grad and stage.training else frozenset[int]()
        self._sends_gradients = sends_gradients
        self._check_finite = check_finite
        if context.grad:
            refuse_untrainable(stage.doubtful, recomputes=bool(self._checkpointed))
        stage.refresh()
        # The last layer takes the target, too, if there is no loss function.
        self._layers = stage.layers if loss is None or loss.function is not None else stage.layers_with_target
        self.draws = any(map(may_draw, stage.modules)) or (loss is not None and function_may_draw(loss.function))
        self._stray = stage.stray_gradients() if context.grad else None
        new_queue = list if self._stray is None else self._stray.new_queue
        self._weight_store = WeightGradientStore(stage.deferred, new_queue) if splits and context.grad else None
        self.sharded = stage.fully_sharded()
        self.aliases = Aliases(stage.modules if context.grad else (), self._weight_store, self._stray, self.sharded)
        if not self.aliases.any_deferrable:
            self._weight_store = None
        self._parameter_versions = self.aliases.versions
        self._loss = None if loss is None else LossRun(loss, stage, trains=bool(self.aliases.leaves))
        self._ports = SkipPorts(stage.index, stage.skips) if stage.skips else None
        self.meter: MemoryMeter | None = None
        self.tied: TiedGradients | None = None
        self._kept = Kept(stage.shares_output, loss is not None)
        # Where in the present graph a backward starts with the gradients of skips that come from later stages.
        self._entered: tuple[Root, ...] = ()
        self._in_place = InPlaceChanges(stage, own_leaves if stage.index == 0 else frozenset(), batch)
        self._recompute_check = RecomputeCheck(stage.recompute_looks)
        # The situation of this mini-batch. Graphs may differ between situations, so one graph of each is searched for
        # hidden parameters; `inspected` says whether that has been done.
        self._situation = (loss is None, stage.training, len(self.aliases.leaves))
        self._inspected = self._situation in stage.inspected

    def connect(
        self,
        endpoint: Endpoint,
        *,
        stream: RandomStream | None,
        hold: Hold | None = None,
        before_computing: Callable[[], None] | None = None,
        retain_graph: bool = False,
        in_context: bool = False,
    ) -> dict[str, Callable[[Action], None]]:
        """Prepares for one run of the worker.

        Args:
            endpoint: the worker's side of the transport.
            stream: the source of the worker's random numbers; None: the layers draw none.
            hold: entered by each action that may draw from the generator of an accelerator unseen, if given.
            before_computing: called by an action that has received its inputs, before it computes, if given.
            retain_graph: whether the B actions leave their graphs for another run.
            in_context: whether the caller's settings for the layers are in force during the whole run.

        Returns:
            By the kinds of actions, the functions that execute them.
        """
        self._receive_input = endpoint.receiver("F", self._index)
        self._receive_gradient = endpoint.receiver("B", self._index)
        self._receive_target = endpoint.receiver("target", self._index)
        self._send_output = endpoint.sender("F", self._index + 1)
        self._send_gradient = endpoint.sender("B", self._index - 1) if self._sends_gradients else None
        if self._ports is not None:
            self._ports.connect(endpoint)
        self._enter_stream = None if stream is None else stream.enter
        self._hold = hold
        self._before_computing = before_computing
        self._retain_graph = retain_graph
        self._in_context = in_context
        self._memory = SharedMemory(self.aliases.leaves)
        # What is done around the layers, in F and in R, from the inside out. Something of your own, such as a profiler,
        # goes around `run` here. Mostly there is nothing: then `run_layers` is the layers alone.
        run = self._run_layers_alone if self._ports is None else partial(self._run_with_skips, self._ports)
        if self._weight_store is not None:
            run = partial(_deferring, self._weight_store, run)
        if self.meter is not None:
            run = partial(self._measuring, self.meter, run)
        if hold is not None:
            run = partial(_holding, hold, run)
        if self._stray is not None or not self._inspected:
            run = partial(self._inspecting, run)
        self.run_layers: RunLayers = run
        backward = self.backward
        if in_context and self._context.autocasts:
            # As PyTorch advises: autocast would cast the products and sums of a backward again.
            backward = self._context.without_autocast()(backward)
        return {"F": self.forward, "R": self.recompute, "B": backward, "I": backward, "W": backward}

    def disconnect(self) -> None:
        """After a run: drops the functions that refer to this object."""
        self._before_computing = None
        del self.run_layers
        if self._weight_store is not None:
            self._weight_store.learn(self.aliases.parameters, self.aliases.leaves)

    def forward(self, action: Action) -> None:
        """F: computes the stage's output for one micro-batch and sends it on."""
        micro_batch, loss, ports = action[2], self._loss, self._ports
        leaves, structure = self._receive_input(micro_batch)
        if loss is not None:
            loss.targets[micro_batch] = self._receive_target(micro_batch)
        arrived: list[Arrived] = []
        if ports is not None:
            leaves, structure, arrived = ports.receive(micro_batch, leaves, structure)
        if self._before_computing is not None:
            self._before_computing()
        if micro_batch in self._checkpointed:
            outputs, structure = self._first_pass(leaves, structure, micro_batch, arrived)
        else:
            outputs, structure = self.run_layers(leaves, structure, micro_batch)
            if self._grad:
                self._kept.put(micro_batch, leaves, outputs, self._entered)
            if loss is not None:
                del loss.targets[micro_batch]
        if self._check_finite:
            refuse_non_finite(outputs, f"an output of stage {self._index}")
        if ports is not None:
            ports.refuse_overwritten(arrived)
        of_parameters: list[int] = []
        output: Tensor | None = None
        for number, output in enumerate(outputs):
            if (output.is_leaf or _viewed(output) is not None) and self.aliases.has_memory_of(output):
                of_parameters.append(number)
        # What is sent has no graph, and this frame must not keep the graph either.
        output, outputs = None, tuple(map(_cut, outputs))
        for number in of_parameters:
            boundary.mark_unchangeable(outputs[number])
        if self._in_place.refuses:
            self._in_place.mark(outputs)
        if self.meter is not None:
            self.meter.sending(outputs)
        if ports is not None:
            outputs, structure = ports.send(micro_batch, outputs, structure, arrived)
        self._send_output(micro_batch, (outputs, structure))

    def recompute(self, action: Action) -> None:
        """R: computes a checkpointed micro-batch again and keeps the graph. Needs no gradient: it may run early."""
        if self._before_computing is not None:
            self._before_computing()
        micro_batch, again = action[2], self._retain_graph
        inputs = self._kept.take_inputs(micro_batch, again=again)
        if inputs is None:
            return  # this stage is in evaluation mode: nothing was checkpointed here
        leaves, structure, buffers, versions = inputs
        del inputs
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
        context = contextlib.nullcontext() if self._in_context else self._context.entered()
        with context, recomputing(), buffers.standing_in(again=again):
            outputs, _ = self.run_layers(leaves, structure, micro_batch)
            self._kept.put(micro_batch, leaves, outputs, self._entered)
            self._recompute_check.compare(micro_batch, outputs, self._stage.place)
        if self._loss is not None:
            self._loss.targets.pop(micro_batch, None)  # it is recomputed once

    def backward(self, action: Action) -> None:
        """B: differentiates one micro-batch, adds to the parameters' gradients, sends the input's gradient.

        I: the same, but defers the gradients of parameters to W where possible. W: computes the deferred gradients, and
        adds them to the parameters' gradients.
        """
        kind, micro_batch = action[0], action[2]
        try:
            if kind != "W":
                self._differentiate(micro_batch)
            elif self._before_computing is not None:
                self._before_computing()
            if self._weight_store is not None and kind != "I":
                self._add_weight_gradients(self._weight_store, micro_batch)
        except RuntimeError as error:
            if (text := explain_freed_graph(error, self._stage)) is not None:
                add_note(error, text)
            raise
        if self.sharded is not None:
            self.sharded.accumulate(self.aliases.parameters, self.aliases.leaves)
        if self.meter is not None and not self._retain_graph:
            if kind == "I":
                waiting = () if self._weight_store is None else self._weight_store.kept(micro_batch)
                self.meter.waiting(self._index, micro_batch, waiting)
            else:
                self.meter.released(self._index, micro_batch)

    def _differentiate(self, micro_batch: int) -> None:
        """Runs autograd for one micro-batch, and sends the input's gradient."""
        loss = self._loss
        gradients: tuple[Tensor | None, ...] = () if loss is not None else self._receive_gradient(micro_batch)[0]
        leaves, roots = self._kept.take(micro_batch, again=self._retain_graph)
        if loss is not None:
            gradients = (loss.gradient(roots[0]),)
        if self._ports is not None:
            gradients += self._ports.receive_gradients(micro_batch)
        if self._before_computing is not None:
            self._before_computing()
        starts: list[Tensor | GradientEdge] = []
        seeds: list[Tensor] = []
        for root, gradient in zip(roots, gradients, strict=True):
            if root is not None and gradient is not None:
                starts.append(root)
                seeds.append(gradient)
        if self.tied is not None:
            for alias, gradient in self.tied.begun(micro_batch):
                starts.append(alias)
                seeds.append(gradient)
        if not starts:
            of_leaves: tuple[Tensor | None, ...] = (None,) * len(leaves)
            if self._weight_store is not None:
                self._weight_store.nothing_to_differentiate(micro_batch)
        elif self._hold is None:
            of_leaves = self._gradients(leaves, tuple(starts), tuple(seeds), micro_batch)
        else:
            with self._hold:
                of_leaves = self._gradients(leaves, tuple(starts), tuple(seeds), micro_batch)
        if self._check_finite:
            refuse_non_finite(of_leaves, f"the gradient of an input of stage {self._index}")
            self._check_parameters()
        if self.tied is not None:
            SharedMemory(self.aliases.leaves).separate()  # a gradient that is handed on comes anew
            self.tied.hand_on(micro_batch)
        elif self._memory.pending:
            self._memory.separate()
        if self._ports is not None:
            of_leaves = self._ports.send_gradients(micro_batch, of_leaves)
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
            return boundary.gradients(leaves, torch_private.run_backward, starts, seeds, self._retain_graph)
        run = partial(torch_private.run_backward, starts, seeds, self._retain_graph)
        return boundary.gradients(leaves, self._weight_store.differentiate, micro_batch, run)

    def _add_weight_gradients(self, store: WeightGradientStore, micro_batch: int) -> None:
        """The deferred gradients."""
        store.add_weight_gradients(micro_batch, again=self._retain_graph)
        if self._memory.pending:
            self._memory.separate()
        if self._check_finite:
            self._check_parameters()

    def _check_parameters(self) -> None:
        for name, alias in self.aliases.named(self._layers):
            refuse_non_finite([alias.grad], f"the gradient of parameter {name!r}")

    def awaits(self, name: str, micro_batch: int) -> bool | None:
        """Whether a message of this name will come; see `SkipPorts.awaits`."""
        return True if self._ports is None else self._ports.awaits(name, micro_batch)

    @property
    def in_flight(self) -> set[int]:
        """The micro-batches of which this stage holds something: inputs, a graph, or what waits for a W."""
        store = self._weight_store
        waiting = [] if store is None else [n for n in store.micro_batches if store.kept(n)]
        return {*self._kept.micro_batches, *waiting}

    def clear(self) -> None:
        """Drops every tensor, after a failure: the traceback refers to this object."""
        if self._loss is not None:
            self._loss.clear()
        self._kept.clear()
        self._recompute_check.clear()
        if self._weight_store is not None:
            self._weight_store.clear()
        if self.tied is not None:
            self.tied.clear()
        self.aliases.take_gradients()
        if self.sharded is not None:
            self.sharded.forget()

    def _first_pass(
        self, leaves: tuple[Tensor, ...], structure: AnyStructure, micro_batch: int, arrived: list[Arrived]
    ) -> tuple[tuple[Tensor, ...], AnyStructure]:
        """Computes a checkpointed micro-batch: keeps the input, and not the graph.

        Autograd records a graph all the same: it shows which outputs require a gradient, and a module that reads grad
        mode does the same in both passes. The graph is freed with the outputs. Until then it takes as much memory as
        that of the recomputation.
        """
        buffers = self._stage.buffers.snapshot()
        target = () if self._loss is None else self._loss.targets[micro_batch][0]
        of_target = list(map(_version, target))
        unknown, kept = self._in_place.found is None, list(map(_version, leaves))
        own = self._in_place.inputs_of_first_pass(leaves)
        versions = list(map(_version, own))
        arrived[:] = [each._replace(tensor=own[each.number], version=versions[each.number]) for each in arrived]
        with checkpointing():
            outputs, structure_out = self.run_layers(own, structure, micro_batch)
        self._entered = ()
        if of_target != list(map(_version, target)):
            raise RuntimeError(
                "the loss changed its target in place, and checkpointing needs the target again. Clone it in the loss, "
                "or use checkpoint='never'"
            )
        snapshot = self._stage.buffers.learn(buffers)
        is_differentiated = self._loss is not None or (self._ports is not None and self._ports.any_gradients)
        if is_differentiated or any(output.requires_grad for output in outputs):
            self._kept.put_inputs(micro_batch, Inputs(leaves, structure, snapshot, kept))
            self._recompute_check.keep(micro_batch, outputs)
        else:  # no R: no gradient will reach this stage
            self._kept.put(micro_batch, leaves, outputs)
        if self._in_place.see_first_pass(own, versions, outputs, is_first=unknown):
            if self._ports is not None:
                self._ports.refuse_overwritten(arrived)
            self._in_place.refuse_overlap(leaves)
        if self.meter is not None:
            self.meter.checkpointed(self._index, micro_batch, [*leaves, *snapshot.tensors])
        return outputs, structure_out

    def _measuring(
        self, meter: MemoryMeter, run: RunLayers, leaves: tuple[Tensor, ...], structure: AnyStructure, micro_batch: int
    ) -> LayersResult:
        target = () if self._loss is None else self._loss.targets[micro_batch][0]
        with meter.measuring(self._index, micro_batch, leaves, target):
            return run(leaves, structure, micro_batch)

    def _inspecting(
        self, run: RunLayers, leaves: tuple[Tensor, ...], structure: AnyStructure, micro_batch: int
    ) -> LayersResult:
        outputs, structure = run(leaves, structure, micro_batch)
        if not self._inspected and any(output.requires_grad for output in outputs):
            refuse_hidden_parameters(self._stage, self.aliases, leaves, outputs)
            self._stage.inspected.add(self._situation)
            self._inspected = True
        if self._stray is not None:
            self._stray.watch(leaves)  # a layer may keep a tensor of this graph
        return outputs, structure

    def _run_with_skips(
        self, ports: SkipPorts, leaves: tuple[Tensor, ...], bundle: Bundle, micro_batch: int
    ) -> LayersResult:
        """Runs the layers while they may stash and pop."""
        value, popped = leaves[: bundle.own], leaves[bundle.own :]
        of_value = self._alias(value, micro_batch)
        entered, begun = ports.entered(micro_batch, popped, of_value, bundle)
        self._entered = tuple(map(edge, begun))
        tracker = ports.tracker(entered)
        with skip_tracker.using(tracker):
            outputs, structure = self._run_layers_alone(value, bundle.structure, micro_batch, of_value)
        # A popped tensor may also be a tensor of the value, whose changes have been looked for above.
        pairs = zip(popped, entered.values(), strict=True)
        apart = [pair for pair in pairs if not any(pair[1] is each for each in of_value)]
        self._in_place.see([leaf for leaf, _ in apart], [alias for _, alias in apart])
        stashed, bundle = ports.bundle(structure, outputs, tracker)
        return outputs + stashed, bundle

    def _alias(self, leaves: tuple[Tensor, ...], micro_batch: int) -> tuple[Tensor, ...]:
        """The tensors that the layers get: aliases of the leaves if an in-place change must be found."""
        if self._in_place.found is False:
            return leaves
        return self._in_place.aliases(leaves, recomputed=micro_batch in self._checkpointed)

    def _run_layers_alone(
        self,
        leaves: tuple[Tensor, ...],
        structure: AnyStructure,
        micro_batch: int,
        aliases: tuple[Tensor, ...] | None = None,
    ) -> LayersResult:
        if aliases is None:
            aliases = leaves if self._in_place.found is False else self._alias(leaves, micro_batch)
        value = aliases[0] if structure is None else nested.unflatten(aliases, structure)
        loss, enter_stream = self._loss, self._enter_stream
        if loss is not None and not loss.trains:
            loss.trains = any(leaf.requires_grad for leaf in leaves)
        takes_target, target = -1, None
        if loss is not None:
            takes_target, (tensors, around) = loss.taker, loss.targets[micro_batch]
            target = tensors[0] if around is None else nested.unflatten(tensors, around)
        # The structure in stage 0 has positional and keyword arguments; None, a single tensor, is the usual case.
        has_arguments = structure is not None and self._index == 0
        for module, number, name, takes_tuple_whole in self._layers:
            if enter_stream is not None:
                enter_stream(number, micro_batch)
            try:
                if type(value) is Tensor and number != takes_target:  # the usual case
                    value = module(value)
                    continue
                if has_arguments:
                    (arguments, keywords), has_arguments = value, False
                else:
                    arguments, keywords = value if type(value) is tuple and not takes_tuple_whole else (value,), {}
                if number == takes_target:
                    arguments = (*arguments, target)
                value = module(*arguments, **keywords)
            except BaseException as error:
                self._note_layer(error, value, number, layer_text(name, module))
                raise
        if aliases is not leaves:
            self._in_place.see(leaves, aliases)
        if loss is not None:
            return loss.outputs(value, target, micro_batch, enter_stream, grad=self._grad)
        if type(value) is Tensor:  # the usual case
            return (value,), None
        try:
            return nested.flatten(value)
        except TypeError as error:
            add_note(error, f"returned by {self._stage.before(self._layers[-1].number + 1)}")
            raise

    def _note_layer(self, error: BaseException, value: Any, number: int, layer: str) -> None:
        """Adds notes to an error of a layer that was given a value."""
        add_note(error, f"in {layer}")
        note_returned(error, value, self._stage.before(number), layer)
        if self._loss is not None and number == self._loss.taker and isinstance(error, TypeError):
            add_note(
                error,
                "the pipe has no loss_fn, so the last layer is given the target and returns the loss; "
                "or give Pipe a loss_fn",
            )


def _deferring(store: WeightGradientStore, run: RunLayers, leaves: Any, structure: Any, number: int) -> LayersResult:
    """What the layers use of parameters belongs to this micro-batch."""
    store.begin(number)
    result = run(leaves, structure, number)
    store.end()
    return result


def _holding(hold: Hold, run: RunLayers, *given: Any) -> LayersResult:
    with hold:
        return run(*given)


def _version(tensor: Tensor) -> int:
    return -1 if tensor.is_inference() else torch_private.version(tensor)
