"""A stand-in for the graphs of a device on the CPU: a capture records operators, a replay runs them on the same memory.

    capture:  mm(x, w) -> y        recorded: mm, the memory of x, w and y;   at the end y holds NaN
    replay:   mm(x, w) -> y'       y' is copied to the memory of y

So captured steps are compared with eager ones, bitwise and without a GPU. What it shows: memory that nobody refills
before a replay, Python that runs in captures only, what a capture refuses, values of a capture that are read, random
numbers of another state or of another place in it. What it does not show:

* streams, and memory that a pool gives to a later capture: here each result keeps its own;
* copies between the host and a device (`.cpu()`, `torch.tensor(3.0, device=device)`), and what reads memory without an
  operator (`numpy()`, `tolist()`);
* kernels that run in a capture for the first time, and refuse it (cuDNN's benchmark);
* operators that wait for a device and are not in `_WAITING`.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from pipework import torch_private
from pipework.runtime.random import kernels

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

# The host waits for what they find: a number, or the size of their result.
_WAITING = {
    "_linalg_check_errors", "_local_scalar_dense", "_unique", "_unique2", "argwhere", "bincount", "equal",
    "is_nonzero", "item", "masked_select", "nonzero", "repeat_interleave", "unique_consecutive", "unique_dim",
    "unique_dim_consecutive",
}  # fmt: skip


class RecordedState:
    """The state of a random generator.

    Attributes:
        generator: what kernels of the CPU draw from.
    """

    def __init__(self, graphs: RecordedGraphs) -> None:
        kernels.install()
        self._graphs = graphs
        self.generator = torch.Generator("cpu")
        self.seed(0)

    def use(self) -> None:
        """Lets the operators that the capture records from now on draw from this state.

        Raises:
            RuntimeError: there is no capture, it does not know this state, or the state would have to start again in
                it, which that of a device does not.
        """
        recorder = self._graphs.recorder
        if recorder is None or self not in recorder.states:
            raise RuntimeError("the state of a generator is used outside of a capture that was given it")
        if _position(self.generator) != recorder.states[self]:
            raise RuntimeError("the capture has drawn from this state: it goes on there, and does not start again")
        recorder.drawing = self

    def seed(self, seed: int) -> None:
        """Puts the state at its beginning for a seed. Several replays without it draw one after the other."""
        self.generator.manual_seed(seed)
        self._seeded = _position(self.generator)

    @property
    def drew(self) -> bool:
        """Whether replays have drawn from the state since it was seeded."""
        return _position(self.generator) != self._seeded


def _position(generator: torch.Generator) -> bytes:
    """The state of a generator, read without an operator."""
    return generator.get_state().numpy().tobytes()


def _move(generator: torch.Generator, position: bytes) -> None:
    generator.set_state(torch.frombuffer(bytearray(position), dtype=torch.uint8))


@dataclass(frozen=True)
class _Drawing:
    """What `kernels.drawing_from` asks for the generator of this thread."""

    state: RecordedState

    def generator(self) -> torch.Generator:
        return self.state.generator


def _drawing_from(state: RecordedState) -> contextlib.AbstractContextManager[None]:
    return kernels.drawing_from(_Drawing(state))  # type: ignore[arg-type]


@dataclass(frozen=True)
class _Call:
    """A recorded operator; all its tensors are other objects over the same memory."""

    operator: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    results: list[Any]
    drawing: RecordedState | None

    def again(self) -> None:
        with contextlib.nullcontext() if self.drawing is None else _drawing_from(self.drawing):
            results = tree_leaves(self.operator(*self.args, **self.kwargs))
        for old, new in zip(self.results, results, strict=True):
            if isinstance(old, Tensor) and torch_private.memory_key(old) != torch_private.memory_key(new):
                if (old.shape, old.stride(), old.storage_offset()) != (new.shape, new.stride(), new.storage_offset()):
                    raise RuntimeError(f"{self.operator} has a result of another shape or layout than in the capture")
                # The memory, not the values: results may overlap, and two of them may share it.
                old.untyped_storage().copy_(new.untyped_storage())


class RecordedGraph:
    """A graph of `RecordedGraphs`."""

    def __init__(self, graphs: RecordedGraphs) -> None:
        self._graphs = graphs
        self._calls: list[_Call] | None = None

    @contextlib.contextmanager
    def capture(self, states: Sequence[RecordedState] = ()) -> Iterator[None]:
        """A context in which the operators of this thread are recorded, and take no effect in the end.

        Args:
            states: which the operators may draw from.

        Raises:
            RuntimeError: the context does something that a capture does not allow.
        """
        if self._graphs.recorder is not None or self._calls is not None:
            raise RuntimeError("another capture is under way, or this graph was captured")
        recorder = self._graphs.recorder = _Recorder(states)
        default = _position(torch.default_generator)
        try:
            with recorder:
                yield
            if recorder.refused:  # and the exception was caught inside
                raise RuntimeError(f"operation failed due to a previous error during capture: {recorder.refused}")
            self._calls = recorder.calls
        finally:
            self._graphs.recorder = None
            recorder.undo()
            for state, before in recorder.states.items():
                _move(state.generator, before)
            _move(torch.default_generator, default)

    def replay(self) -> None:
        """Runs the recorded operators.

        Raises:
            RuntimeError: the graph was not captured, or a capture is under way.
        """
        if self._calls is None or self._graphs.recorder is not None:
            raise RuntimeError("replay without a successful capture, or during one")
        # The operators are below autograd and autocast, and no stream of the caller is one of the graph's states.
        with torch.no_grad(), torch.autocast("cpu", enabled=False), kernels.drawing_from(None):
            for call in self._calls:
                call.again()


class RecordedGraphs:
    """The stand-in for the graphs of one worker.

    Attributes:
        recorder: of the capture that is under way.

    Example:
        >>> graphs, x = RecordedGraphs(), torch.ones(2)
        >>> graph = graphs.graph()
        >>> with graph.capture():
        ...     y = x * 2
        >>> x.fill_(3.0), y
        (tensor([3., 3.]), tensor([nan, nan]))
        >>> graph.replay()
        >>> y
        tensor([6., 6.])
    """

    def __init__(self) -> None:
        self.recorder: _Recorder | None = None

    def graph(self) -> RecordedGraph:
        """A graph that is not captured yet."""
        return RecordedGraph(self)

    def state(self) -> RecordedState:
        """A state of a random generator."""
        return RecordedState(self)

    def allocating(self) -> contextlib.AbstractContextManager[None]:
        """There is no pool."""
        return contextlib.nullcontext()

    def unowned(self, tensor: Tensor) -> Tensor:
        """The tensor itself: here no memory is used again."""
        return tensor

    def wait(self) -> None:
        """What is dropped here lives as long as anything uses it."""


class _Recorder(torch_private.ThreadDispatchMode):
    """The mode of a capture.

    Args:
        states: which the operators may draw from.

    Attributes:
        calls: the operators so far.
        states: the given ones, and where each was before.
        drawing: the state in use.
        refused: the operator that has ended the capture.
    """

    def __init__(self, states: Sequence[RecordedState]) -> None:
        super().__init__()
        self.calls: list[_Call] = []
        self.states = {state: _position(state.generator) for state in states}
        self.drawing: RecordedState | None = None
        self.refused: str | None = None
        self._made: dict[int, Tensor] = {}  # by memory: a result of the capture
        self._before: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}  # written memory, and a copy

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "profiler":
            return func(*args, **kwargs)
        if self.refused:
            raise RuntimeError(f"operation failed due to a previous error during capture: {self.refused}")
        self._check(func, args, kwargs)
        for written in (*torch_private.written_arguments(func, args, kwargs), *_running(func, args, kwargs)):
            self._keep(written)
        given = {torch_private.memory_key(each) for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)}
        plain_args, plain_kwargs = tree_map(_alias, args), tree_map(_alias, kwargs)  # before shapes change in place
        with contextlib.nullcontext() if self.drawing is None else _drawing_from(self.drawing):
            result = func(*args, **kwargs)
        results = tree_map(_alias, tree_leaves(result))
        for each in results:
            if isinstance(each, Tensor):
                key = torch_private.memory_key(each)
                if key is None:
                    self._refuse(f"{func} (a result without a memory of its own)")
                elif key not in given:
                    self._made.setdefault(key, each)
        self.calls.append(_Call(func, plain_args, plain_kwargs, results, self.drawing))
        return result

    def undo(self) -> None:
        """Puts back what was written, and spoils what was made."""
        for memory, copy in self._before.values():
            memory.copy_(copy)
        for each in self._made.values():
            if each.is_floating_point() or each.is_complex():
                memory = each.untyped_storage()
                count = memory.nbytes() // each.element_size()
                torch.empty(0, dtype=each.dtype, device=each.device).set_(memory, 0, (count,), (1,)).fill_(float("nan"))

    def _check(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        name = func.overloadpacket.__name__
        if name in _WAITING or (name.startswith(("index", "_index", "_unsafe_index")) and _selects(name, args, kwargs)):
            self._refuse(str(func))
        if any(isinstance(each, torch.Generator) for each in tree_leaves((args, kwargs))):
            self._refuse(f"{func} (from a generator that the capture does not know)")

    def _refuse(self, what: str) -> None:
        self.refused = what
        raise RuntimeError(f"{what}: operation not permitted when stream is capturing")

    def _keep(self, written: Tensor) -> None:
        memory = written.untyped_storage()
        key = torch_private.storage_key(memory)
        if key not in self._made and key not in self._before:
            self._before[key] = memory, memory.clone()


def _alias(leaf: Any) -> Any:
    """A tensor over the same memory, with a version counter of its own: a replay counts no changes in place."""
    return leaf.data if isinstance(leaf, Tensor) else leaf


def _running(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Tensor]:
    """The running statistics of a normalization, to which it writes; not all schemas say so."""
    for position, argument in enumerate(func._schema.arguments):
        if argument.name.startswith("running_"):
            given = args[position] if position < len(args) else kwargs.get(argument.name)
            if given is not None:
                yield given


def _selects(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether an index is a mask whose elements are counted; that of one number into masked places is not."""
    masks = [each for each in tree_leaves(args[1:2]) if isinstance(each, Tensor) and each.dtype in _MASKS]
    fills = "put" in name and args[2].numel() == 1 and not any((*args[3:4], kwargs.get("accumulate")))
    return bool(masks) and not fills


_MASKS = (torch.bool, torch.uint8)
