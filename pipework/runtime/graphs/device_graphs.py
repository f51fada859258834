"""Graphs of one worker's device: they record what a thread launches, and launch all of it again in one call.

This file has all that is CUDA's own. Tests have a stand-in of the same interface on the CPU.
"""

from __future__ import annotations

import contextlib
import warnings
from typing import TYPE_CHECKING, Any

import torch

from pipework import torch_private
from pipework.runtime.random.kernels import device_generator

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from contextlib import AbstractContextManager

    from torch import Tensor


def can_capture(device: torch.device) -> bool:
    """Whether there are graphs for a device.

    Example:
        >>> can_capture(torch.device("cpu"))
        False
    """
    return device.type == "cuda"


class RandomState:
    """A state of the random numbers of a device's default generator, whose seed and offset lie on the device.

    Graphs read it when they are replayed.

    Attributes:
        generator: from which kernels of the CPU draw while it is in use; None: the device has a generator of its own.
        state: the state itself.
    """

    generator: torch.Generator | None = None

    def __init__(self, device: torch.device) -> None:
        self._default = torch.cuda.default_generators[device.index]
        self.state = self._default.clone_state()

    def use(self) -> None:
        """During a capture: what is launched from now on draws from this state, from its beginning."""
        self._default.graphsafe_set_state(self.state)

    def seed(self, seed: int) -> None:
        """Before a replay: the state begins at a seed."""
        self.state.manual_seed(seed)

    @property
    def drew(self) -> bool:
        """Whether the graph that was replayed last has drawn from it: that moves the offset."""
        return self.state.get_offset() != 0


class Graph:
    """What one action launches.

    Args:
        pool: for its temporary memory.
        device: of the pool.
    """

    def __init__(self, pool: torch.cuda.MemPool, device: torch.device) -> None:
        self._graph = torch.cuda.CUDAGraph()  # the first attribute goes first: a pool outlives its graphs
        self._pool = pool
        self._device = device

    @contextlib.contextmanager
    def capture(self, states: Sequence[RandomState]) -> Iterator[None]:
        """A context in which this thread's launches are recorded, and take no effect.

        A lock keeps other threads from the default generator, which has other states inside.

        Args:
            states: that may be used inside.

        Raises:
            RuntimeError: inside, what cannot be captured was asked for.
        """
        with device_generator(self._device).lock, warnings.catch_warnings():
            warnings.filterwarnings("ignore", "The CUDA Graph is empty")  # as where nothing needs a gradient
            generator = torch.cuda.default_generators[self._device.index]
            own = generator.graphsafe_get_state()
            torch_private.register_states(self._graph, [each.state for each in states])
            # A workspace of an earlier capture would be shared with graphs that may be dropped before this one.
            torch_private.clear_workspaces()
            uses = self._pool.use_count()
            # Other threads may allocate and wait, such as NCCL's watchdog and those that load data.
            pool: Any = self._pool.id
            self._graph.capture_begin(pool, capture_error_mode="thread_local")
            try:
                try:
                    yield
                finally:
                    generator.graphsafe_set_state(own)
                self._graph.capture_end()
            except BaseException:
                torch_private.abort_capture(self._graph, self._device, self._pool, uses)
                raise
            finally:
                torch_private.clear_workspaces()

    def replay(self) -> None:
        """Launches all of it."""
        self._graph.replay()


class Graphs:
    """Makes the graphs of one worker, whose temporary memory is one pool.

    A graph may write to memory that an earlier one has freed. So graphs are replayed in the order of their captures.

    Args:
        device: of the worker.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        with torch.cuda.device(device):
            self._pool = torch.cuda.MemPool()

    def graph(self) -> Graph:
        """A new graph."""
        return Graph(self._pool, self._device)

    def state(self) -> RandomState:
        """A new state."""
        return RandomState(self._device)

    def allocating(self) -> AbstractContextManager[None]:
        """A context in which this thread allocates in the pool."""
        return torch.cuda.use_mem_pool(self._pool, self._device)

    def unowned(self, tensor: Tensor) -> Tensor:
        """The same memory; when the tensor is gone, a later graph may use it, too."""
        return torch_private.unowned(tensor)

    def wait(self) -> None:
        """Before graphs are dropped: waits until the device has replayed them."""
        torch.cuda.synchronize(self._device)
