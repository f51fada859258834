"""The run in which a step is captured: each action is recorded as a graph, which is replayed at once.

    receive from another worker -> static tensor -+
                                                  +-> [capture: layers, or autograd] -> replay -> send a copy
    receive from a stage of this worker ----------+

So the run gives the step's results, and other processes do not notice it. Everything of the transport is between
graphs. What the stages do, and in which order, becomes a `script` for each action. `ReplayedStage` follows it in the
next steps (`captured`).
"""

from __future__ import annotations

import contextlib
import random
import sys
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch

from pipework.runtime.failure import add_note
from pipework.runtime.graphs.script import Receiving, Replaying, Sending
from pipework.runtime.graphs.static_tensor import StaticTensor
from pipework.runtime.random.streams import RandomStream, mix

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch import Tensor

    from pipework.model.batchnorm import DeferredBatchNorms
    from pipework.runtime.graphs.device_graphs import Graph, Graphs, RandomState
    from pipework.runtime.graphs.script import Name, Script
    from pipework.runtime.random.streams import Key
    from pipework.runtime.stage.memory_meter import MemoryMeter
    from pipework.runtime.stage.stage import Stage
    from pipework.runtime.stage.stage_run import StageRun
    from pipework.runtime.transport import Address, Endpoint, Handler, Message, Receive, Send
    from pipework.schedule import Action


class _MoreStates(Exception):
    """An action enters more random streams than it has states for."""


class _Open(NamedTuple):
    """A graph that is being captured.

    Attributes:
        graph: as above.
        stack: with the capture.
        entered: the layers for which states were used.
        drawn: the states of generators on the host, before.
    """

    graph: Graph
    stack: contextlib.ExitStack
    entered: list[int]
    drawn: tuple[Any, ...]


class StepCapture:
    """Captures the actions of one run, which one thread executes.

    Args:
        graphs: of each worker.
        key: of the random numbers.
        goes_on: whether the run goes on without graphs if a forward cannot be captured.
        deferred: the deferred batch norms of the layers.

    Attributes:
        scripts: what was captured, by the action's kind, stage and micro-batch.
        sizes: the bytes that a recording shows of an action, likewise.
        gradients: of the parameters of each stage, where the graphs leave them.
        given_up: why the run goes on without graphs; empty: it does not.
        stream: of the thread.
        within: the messages between stages of one worker.
        state: from which the layer that is being captured draws.
    """

    def __init__(self, graphs: Mapping[int, Graphs], key: Key, deferred: DeferredBatchNorms, *, goes_on: bool) -> None:
        self.scripts: dict[Address, Script] = {}
        self.sizes: dict[Address, tuple[int, int, int]] = {}
        self.gradients: dict[int, list[Tensor | None]] = {}
        self.given_up = ""
        self.state: RandomState | None = None
        self.stream = CapturedStream(self, key)
        self.within: dict[Address, Message] = {}
        self._graphs = graphs
        self._goes_on = goes_on
        self._deferred = deferred
        self._states: dict[int, list[RandomState]] = {worker: [] for worker in graphs}
        self._open: _Open | None = None
        # Of the present part of an action. If the part begins once more, its messages have been received and sent.
        self._worker = -1
        self._stage: Stage | None = None
        self._script: Script = []
        self._received: list[Message] = []
        self._reads = self._sends = self._sent = 0

    def around(self, part: Handler, run: StageRun, worker: int, *, receives: bool) -> Handler:
        """A part of an action, whose computation is captured.

        Args:
            part: as above.
            run: of the stage.
            worker: of the stage.
            receives: whether the part receives messages: its computation begins after these.
        """
        index = run.stage.index

        def captured(action: Action) -> None:
            self._worker, self._stage = worker, run.stage
            self._script = self.scripts.setdefault((action.kind, index, action.micro_batch), [])
            self._received, self._sent = [], 0
            moments = self._deferred.collected()
            while True:
                self._reads = self._sends = 0
                try:
                    if not receives:
                        self.begin()
                    part(action)
                    self.close()
                    break
                except BaseException as error:
                    if not self._abort(error):
                        raise
                    # A backward cannot begin once more: its graph is consumed.
                    if action.kind != "F" or not (self._adds_states(error) or self._gives_up(error)):
                        if isinstance(error, Exception) and not isinstance(error, torch.OutOfMemoryError):
                            add_note(error, CANNOT)
                        raise
                    self._deferred.collect(moments)
            self.gradients[index] = [leaf.grad for leaf in run.aliases.leaves]

        return captured

    def begin(self) -> None:
        """An action computes from now on."""
        if self._open is not None or self.given_up:
            return
        graph, stack = self._graphs[self._worker].graph(), contextlib.ExitStack()
        stack.enter_context(graph.capture(self._states[self._worker]))
        self._open = _Open(graph, stack, [], _drawn_on_the_host())

    @property
    def is_open(self) -> bool:
        """Whether an action is being captured."""
        return self._open is not None

    def close(self) -> None:
        """The computation is over: its graph does what was captured."""
        if self._open is None:
            return
        graph, stack, entered, drawn = self._open
        if _drawn_on_the_host() != drawn:
            raise RuntimeError(
                "a layer drew random numbers from Python's random or NumPy, which a graph does not draw again: take "
                "torch.rand on the device"
            )
        stack.close()
        self._open = self.state = None
        used = list(zip(self._states[self._worker], entered, strict=False))
        for state, layer in used:
            state.seed(mix(self.stream.key.value(), layer, self.stream.micro_batch))
        graph.replay()
        self._script.append(Replaying(graph, [pair for pair in used if pair[0].drew]))

    def enter(self, layer: int) -> None:
        """A layer runs from now on, and draws numbers of its own."""
        if self._open is None:
            return
        states, entered = self._states[self._worker], self._open.entered
        if len(entered) == len(states):
            raise _MoreStates
        self.state = states[len(entered)]
        self.state.use()
        entered.append(layer)

    def receive(self, name: Name, receive: Receive, micro_batch: int) -> Message:
        """A message. The tensors of one from outside of the worker are static."""
        self._reads += 1
        if self._reads > len(self._received):
            message = self.within.pop((*name, micro_batch), None)
            if message is None:
                tensors, structure = message = receive(micro_batch)
                if (pairs := self._static(StaticTensor.filled, tensors)) is not None:
                    message = tuple([pair and pair[0] for pair in pairs]), structure
                    self._script.append(Receiving(name, tuple([pair and pair[1] for pair in pairs]), structure))
            self._received.append(message)
        return self._received[self._reads - 1]

    def send(self, name: Name, send: Send, micro_batch: int, message: Message) -> None:
        """Sends copies of tensors that graphs have computed, or that are static."""
        self.close()
        self._sends += 1
        if self._sends <= self._sent:
            return
        self._sent += 1
        tensors, structure = message
        if (statics := self._static(StaticTensor, tensors)) is not None:
            self._script.append(Sending(name, tuple(statics), structure))
            message = tuple([None if each is None else each.copied() for each in statics]), structure
        send(micro_batch, message)

    def _static(self, make: Callable[[Tensor, Graphs], Any], tensors: Sequence[Tensor | None]) -> list[Any] | None:
        """What is made of each tensor of a message; None: the run goes on without graphs."""
        graphs = self._graphs[self._worker]
        try:
            return None if self.given_up else [None if each is None else make(each, graphs) for each in tensors]
        except TypeError as error:
            if self._gives_up(error):
                return None
            add_note(error, "what workers exchange is copied for graphs: change that, or leave graphs= out")
            raise

    def note_sizes(self, meter: MemoryMeter, action: Action) -> None:
        """After an action: what a recording shows of it."""
        kind, stage, micro_batch, _ = action
        self.sizes[kind, stage, micro_batch] = meter.read(stage, micro_batch)

    def _abort(self, error: BaseException) -> bool:
        """Ends a capture in which something has failed. Returns whether there was one."""
        if self._open is None:
            return False
        stack, self._open, self.state = self._open.stack, None, None
        with contextlib.suppress(BaseException):  # the error itself, which is raised again
            stack.__exit__(type(error), error, error.__traceback__)
        torch.clear_autocast_cache()  # of casts that were captured, and have no values
        return True

    def _adds_states(self, error: BaseException) -> bool:
        """Whether an action has lacked states, of which there are more now."""
        if not isinstance(error, _MoreStates):
            return False
        assert self._stage is not None
        states = self._states[self._worker]
        states += [self._graphs[self._worker].state() for _ in range(len(states) + len(self._stage.layers) + 1)]
        return True

    def _gives_up(self, error: BaseException) -> bool:
        """Whether the run goes on without graphs."""
        assert self._stage is not None
        # Kernels that no wrapper sees would draw from the generator as it is.
        unseen = self._stage.device.unseen_draws
        if not self._goes_on or (unseen is not None and unseen.found) or not isinstance(error, Exception):
            return False
        # Not the error itself, whose traceback holds activations.
        self.given_up = f"{error} ({'; '.join(getattr(error, '__notes__', ()))})"
        self.stream.moves_generators = True
        return True


CANNOT: Final = (
    "this action cannot be captured as a graph: its layers wait for the device, look at values, or allocate by them "
    "(see docs/gpus.md). Change that, or leave graphs= out; with graphs='auto' the pipe goes on without graphs after a "
    "forward, and a backward cannot begin once more"
)


def _drawn_on_the_host() -> tuple[Any, ...]:
    """Differs after a draw from the generators of Python and NumPy."""
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return (random.getstate(),)
    _, key, position, *_ = numpy.random.get_state()
    return random.getstate(), key.tobytes(), position


class CapturedStream(RandomStream):
    """The stream of a thread that captures: each layer that it enters draws from a state of its own.

    Args:
        capture: the run.
        key: of the random numbers.
    """

    __slots__ = ("_capture",)

    def __init__(self, capture: StepCapture, key: Key) -> None:
        super().__init__(key)
        self._capture = capture
        self.moves_generators = False  # the state in use is that of the device's generator

    @property
    def is_captured(self) -> bool:
        """See `RandomStream.is_captured`."""
        return self._capture.is_open

    def enter(self, layer: int, micro_batch: int) -> None:
        """See `RandomStream.enter`."""
        super().enter(layer, micro_batch)
        self._capture.enter(layer)

    def generator(self) -> torch.Generator:
        """See `RandomStream.generator`."""
        state = self._capture.state
        if state is None:
            return super().generator()
        if state.generator is None:
            raise RuntimeError(
                "a layer drew random numbers on the CPU, which a graph does not draw again: take torch.rand on the "
                "device"
            )
        return state.generator

    def accessed(self) -> torch.Generator:
        """See `RandomStream.accessed`."""
        if self._capture.state is None:
            return super().accessed()
        raise RuntimeError(
            "a layer read or replaced the state of random numbers, as torch.utils.checkpoint does, and a graph does "
            "not do so again: let the pipe compute micro-batches again (checkpoint=), or give that of PyTorch "
            "preserve_rng_state=False if nothing in it draws"
        )


class CapturingEndpoint:
    """A worker's side of the transport in a run that is captured; see `Endpoint`.

    Args:
        endpoint: the side itself.
        capture: the run.
        stage: one of the worker's.
        placement: the worker of each stage.
    """

    def __init__(self, endpoint: Endpoint, capture: StepCapture, stage: int, placement: tuple[int, ...]) -> None:
        self._endpoint = endpoint
        self._capture = capture
        self._own = {number for number, worker in enumerate(placement) if worker == placement[stage]}

    def sender(self, kind: str, stage: int) -> Send:
        """See `Endpoint.sender`. Between stages of one worker nothing is copied: its graphs read what they write."""
        if stage in self._own:
            within = self._capture.within
            return lambda micro_batch, message: within.__setitem__((kind, stage, micro_batch), message)
        return partial(self._capture.send, (kind, stage), self._endpoint.sender(kind, stage))

    def receiver(self, kind: str, stage: int) -> Receive:
        """See `Endpoint.receiver`."""
        return partial(self._capture.receive, (kind, stage), self._endpoint.receiver(kind, stage))

    def handlers(self, of_stage: Mapping[str, Handler]) -> Mapping[str, Handler]:
        """See `Endpoint.handlers`."""
        return self._endpoint.handlers(of_stage)

    def finish(self) -> None:
        """See `Endpoint.finish`."""
        self._endpoint.finish()
