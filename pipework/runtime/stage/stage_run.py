"""One mini-batch on one stage: what lives between its actions, and how they are put together for a run.

    Stage            lives as long as its pipe
      StageRun       one mini-batch: aliases of parameters, kept graphs, the loss, skips
        connect -> StageActions    one run of the worker: the handlers of F, R, B, I, W (see `actions`)
                     run_forward   = StageForward, and around it what the mini-batch needs or watches
                     run_backward  = StageBackward, likewise

What is around a computation or a handler is decided here, once for a run, and nowhere else: mostly it is nothing.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from pipework.autograd.aliases import Aliases, SharedMemory
from pipework.autograd.weight_split.store import WeightGradientStore
from pipework.runtime.graphs.step_capture import CapturingEndpoint
from pipework.runtime.random.streams import function_may_draw, may_draw
from pipework.runtime.skips.connections import SkipPorts
from pipework.runtime.stage import observers
from pipework.runtime.stage.actions import HANDLERS, StageActions, chained
from pipework.runtime.stage.in_place import InPlaceChanges
from pipework.runtime.stage.kept import Kept
from pipework.runtime.stage.layer_errors import refuse_non_finite, refuse_untrainable
from pipework.runtime.stage.loss import LossRun
from pipework.runtime.stage.offload import Offload
from pipework.runtime.stage.recomputation import Recomputation
from pipework.runtime.stage.stage_backward import StageBackward
from pipework.runtime.stage.stage_forward import StageForward

if TYPE_CHECKING:
    from collections.abc import Callable

    from pipework.autograd.tied_gradients import TiedGradients
    from pipework.runtime.graphs.step_capture import StepCapture
    from pipework.runtime.program import Program
    from pipework.runtime.run_spec import RunSpec, StepSpec
    from pipework.runtime.stage.memory_meter import MemoryMeter
    from pipework.runtime.stage.stage import Stage
    from pipework.runtime.stage.stage_backward import Backward
    from pipework.runtime.stage.stage_forward import Forward, Look
    from pipework.runtime.transport import Endpoint, Handler, Receive, Send
    from pipework.runtime.worker import WorkerRun
    from pipework.schedule import Action


class StageRun:
    """One stage's part in one mini-batch. All actions of a stage are executed by one worker, one after the other.

    Args:
        stage: the stage.
        program: the schedule.
        spec: the mini-batch.

    Attributes:
        stage: as above.
        trains: whether gradients are wanted.
        checkpointed: the micro-batches that are recomputed; none in evaluation mode.
        draws: whether the stage may draw random numbers.
        aliases: of its parameters.
        kept: what lives between the actions of a micro-batch.
        in_place: finds in-place changes of inputs, and cuts outputs from their graph.
        recomputation: the two passes of a checkpointed micro-batch.
        offload: what is in host memory; None: nothing ever is.
        store: what is deferred to W; None: nothing is.
        loss: computed after the layers; None: by no or by another stage.
        ports: the skips of the stage; None: it has none.
        situation: graphs may differ between situations, so one graph of each is searched for hidden parameters.
        sharded: the parameters of the stage that FSDP shards; None: it shards none.
        meter: counts bytes; None: nothing does.
        tied: the gradients of parameters that other stages of this process use, too; None: there are none.
        capture: captures the actions as graphs; None: nothing does.
    """

    def __init__(self, stage: Stage, program: Program, spec: StepSpec) -> None:
        is_first, is_last = stage.index == 0, stage.index == program.schedule.stages - 1
        loss = spec.loss if is_last else None
        self.stage = stage
        self._table = program.schedule.table
        self._context = spec.context
        self.trains = spec.context.grad
        recomputes = self.trains and stage.training
        self.checkpointed = program.checkpointed[stage.index] if recomputes else frozenset[int]()
        self._sends_gradients = not is_first or spec.input_gradients
        self._check_finite = spec.check_finite
        if self.trains:
            refuse_untrainable(stage.doubtful, recomputes=bool(self.checkpointed))
        stage.refresh()
        self.draws = any(map(may_draw, stage.modules)) or (loss is not None and function_may_draw(loss.function))
        self._stray = stage.stray_gradients() if self.trains else None
        new_queue = list if self._stray is None else self._stray.new_queue
        splits = self.trains and stage.index in program.schedule.split_stages
        store = WeightGradientStore(stage.deferred, new_queue) if splits else None
        self.sharded = stage.fully_sharded()
        self.aliases = Aliases(stage.modules if self.trains else (), store, self._stray, self.sharded)
        self.store = store if self.aliases.any_deferrable else None
        self.loss = None if loss is None else LossRun(loss, stage, trains=bool(self.aliases.leaves))
        self.ports = SkipPorts(stage.index, stage.skips) if stage.skips else None
        self.meter: MemoryMeter | None = None
        self.tied: TiedGradients | None = None
        self.capture: StepCapture | None = None
        self.kept = Kept(loss is not None)
        offloaded = program.offloaded[stage.index] if self.trains else frozenset[int]()
        self.offload: Offload | None = None
        if offloaded:
            at_once = program.away_at_once[program.schedule.placement[stage.index]]
            self.offload = Offload(stage, self.kept, offloaded - self.checkpointed, at_once, program.releases)
        own_leaves = spec.own_leaves if is_first else frozenset[int]()
        batch = spec.versions if is_first and spec.loss is None else None
        self.in_place = InPlaceChanges(stage, own_leaves, batch, self.checkpointed, self.aliases)
        self.recomputation = Recomputation(stage, self.aliases, compares=spec.captured is None)
        self.situation = (loss is None, stage.training, len(self.aliases.leaves))

    def connect(self, worker: WorkerRun) -> dict[str, Handler]:
        """Prepares for one run of the worker.

        Returns:
            By the kinds of actions, the functions that execute them.
        """
        spec, endpoint = worker.spec, worker.endpoint
        if self.capture is not None:
            endpoint = CapturingEndpoint(endpoint, self.capture, self.stage.index, spec.placement)
        # Called when an action has what comes from elsewhere, and computes from now on.
        before_computing = None if worker.recorded is None else worker.recorded.begin
        memory, retain_graph = SharedMemory(self.aliases.leaves), spec.retain_graph
        forward, backward = self._computations(worker, memory)
        ways = self._ways(endpoint, before_computing)
        actions = StageActions(self, forward, backward, *ways, memory, again=retain_graph)
        # A schedule may have a table with kinds of its own, or without some of the usual ones.
        handlers = {kind: self._handler(kind, actions, spec) for kind in HANDLERS if kind in self._table}
        self._watch(handlers, retain_graph=retain_graph)
        if self.checkpointed and not spec.forward:
            handlers["R"] = self._context.entered()(handlers["R"])
        elif spec.forward and self._context.autocasts:
            # As PyTorch advises: autocast would cast the products and sums of a backward again.
            for kind in [kind for kind in handlers if self._table[kind].adds]:
                handlers[kind] = self._context.without_autocast()(handlers[kind])
        if self.offload is not None:
            marks = [] if before_computing is None else [lambda _: before_computing()]
            for kind in handlers.keys() & self._table["L"].before:
                handlers[kind] = chained(self.offload.arrive, *marks, handlers[kind])
        if spec.step.complete is not None and (last := spec.last_action(self.stage.index)) is not None:
            handlers[last.kind] = chained(handlers[last.kind], observers.after(last, partial(spec.step.complete, self)))
        return handlers

    def _handler(self, kind: str, actions: StageActions, spec: RunSpec) -> Handler:
        """The handler of a kind of action: its parts, one after the other."""
        parts: list[Handler] = [
            partial(part, actions)
            for part in HANDLERS[kind]
            if self.store is not None or part is not StageActions.backward_of_weights
        ]
        if self.capture is not None:
            worker, arrives = spec.placement[self.stage.index], self._table[kind].arrives
            receives = bool(arrives) and (self.loss is None or arrives != "B")  # its gradient is computed
            parts = [
                self.capture.around(part, self, worker, receives=receives and not number)
                for number, part in enumerate(parts)
            ]
        return parts[0] if len(parts) == 1 else chained(*parts)

    def _computations(self, worker: WorkerRun, memory: SharedMemory) -> tuple[Forward, Backward]:
        """Forward and backward, and what is around them, from the inside out. Mostly there is nothing.

        Something of your own, such as a captured graph or a profiler, goes around them here.
        """
        stage, loss, store, hold = self.stage, self.loss, self.store, worker.hold
        enter_stream = None if worker.stream is None else worker.stream.enter
        looks: list[Look] = []
        if self.trains and self.situation not in stage.inspected:
            looks.append(observers.inspecting(self))
        if self._stray is not None:
            looks.append(self._stray.watch)  # a layer may keep a tensor of this graph
        if self._check_finite:
            looks.append(lambda _, outputs: refuse_non_finite(outputs, f"an output of stage {stage.index}"))
        forward: Forward = StageForward(self, enter_stream, looks)
        backward: Backward = StageBackward(self, memory, enter_stream, retain_graph=worker.spec.retain_graph)
        if store is not None:
            forward = observers.deferring(store, forward)
        if self.meter is not None:
            forward = observers.measuring(self.meter, stage.index, loss, forward)
        if self.offload is not None:
            forward = observers.offloading(self.offload, forward)
        if hold is not None:
            forward, backward = observers.holding(hold, forward), observers.holding(hold, backward)
        if self._check_finite:
            backward = observers.finite_gradients(stage.index, self._check_parameters, backward)
        return forward, backward

    def _ways(
        self, endpoint: Endpoint, before_computing: Callable[[], None] | None
    ) -> tuple[Receive, Send, Receive, Send | None]:
        """The ways in and out: of the input and the outputs, of their gradients; those of skips are in them."""
        index, loss, ports = self.stage.index, self.loss, self.ports
        receive, send = endpoint.receiver("F", index), endpoint.sender("F", index + 1)
        receive_gradients = endpoint.receiver("B", index)
        send_gradients = endpoint.sender("B", index - 1) if self._sends_gradients else None
        if loss is not None:
            receive = partial(loss.receive, receive, endpoint.receiver("target", index))
            receive_gradients = partial(loss.receive_gradient, self.kept)
        if self.tied is not None:
            self.tied.open(endpoint.sender, endpoint.receiver)
            receive_gradients = partial(self.tied.receive_gradients, receive_gradients)
            send_gradients = partial(self.tied.send_gradients, send_gradients)
        if ports is not None:
            ports.connect(endpoint)
            receive, send = partial(ports.receive, receive), partial(ports.send, send)
            receive_gradients = partial(ports.receive_gradients, receive_gradients)
            send_gradients = partial(ports.send_gradients, send_gradients)
        begin = None if self.capture is None else self.capture.begin
        for mark in (each for each in (before_computing, begin) if each is not None):
            receive = observers.marking(mark, receive)
            if loss is None:
                receive_gradients = observers.marking(mark, receive_gradients)
        if self.meter is not None:
            send = observers.counting(self.meter, send)
        return receive, send, receive_gradients, send_gradients

    def _watch(self, handlers: dict[str, Handler], *, retain_graph: bool) -> None:
        """Puts around the handlers what watches the actions; mostly there is nothing."""
        sharded, aliases = self.sharded, self.aliases
        for kind, handle in handlers.items():
            row, calls = self._table[kind], [handle]
            if self._check_finite and self.store is not None and "W" in row.adds:
                calls.append(lambda _: self._check_parameters())
            if sharded is not None and row.adds:
                calls.append(lambda _: sharded.accumulate(aliases.parameters, aliases.leaves))
            if self.meter is not None:
                calls.append(observers.measuring_actions(self.meter, self, row.holds, again=retain_graph))
                if self.capture is not None:
                    calls.append(partial(self.capture.note_sizes, self.meter))
            if len(calls) > 1:
                handlers[kind] = chained(*calls)

    def disconnect(self) -> None:
        """After a run: learns from the layers which gradients can be deferred."""
        if self.offload is not None:
            self.offload.settle()
        if self.store is not None:
            self.store.learn(self.aliases.parameters, self.aliases.leaves)

    def sizes(self, action: Action) -> tuple[int, int, int]:
        """After an action, what a recording shows of it: see `MemoryMeter.read`."""
        if self.meter is None:
            return 0, 0, 0
        if self.capture is not None:
            return self.capture.sizes[action.kind, action.stage, action.micro_batch]
        return self.meter.read(action.stage, action.micro_batch)

    def _check_parameters(self) -> None:
        for name, alias in self.aliases.named(self.stage.layers):
            refuse_non_finite([alias.grad], f"the gradient of parameter {name!r}")

    def awaits(self, name: str, micro_batch: int) -> bool | None:
        """Whether a message of this name will come; see `SkipPorts.awaits`."""
        return True if self.ports is None else self.ports.awaits(name, micro_batch)

    @property
    def in_flight(self) -> set[int]:
        """The micro-batches of which this stage holds something: inputs, a graph, or what waits for a W."""
        waiting = [] if self.store is None else [n for n in self.store.micro_batches if self.store.kept(n)]
        return {*self.kept.micro_batches, *waiting}

    def clear(self) -> None:
        """Drops every tensor, after a failure: the traceback refers to this object."""
        for each in (self.loss, self.kept, self.recomputation, self.store, self.tied, self.offload):
            if each is not None:
                each.clear()
        self.aliases.take_gradients()
        if self.sharded is not None:
            self.sharded.forget()
