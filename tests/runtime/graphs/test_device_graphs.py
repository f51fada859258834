"""What is asked of CUDA around a capture, and in which order: a stand-in of torch.cuda writes it down."""

import warnings
from typing import Any

import pytest
import torch

from pipework import torch_private
from pipework.model.batchnorm import DeferredBatchNorms
from pipework.runtime.graphs import captured_steps, device_graphs
from pipework.runtime.graphs.captured_step import CapturedStep
from pipework.runtime.graphs.device_graphs import Graph, Graphs, RandomState

CARD = torch.device("cuda", 0)


class Cuda:
    """Writes down the calls, and refuses those in a wrong order.

    Attributes:
        calls: so far.
        installed: the state of the default generator.
        capturing: the graph whose capture is under way.
        is_invalid: whether CUDA has refused something in it.
        recorded: the pools into which an allocator puts what is captured.
        uses: of the pool.
        keeps_pool: whether a capture that has failed keeps its use of the pool, as up to PyTorch 2.13.
        ends_pool: whether such a capture ends what the allocator does, as from 2.13 on.
    """

    def __init__(self, version: tuple[int, int]) -> None:
        self.calls: list[str] = []
        self.installed = "own"
        self.capturing: Any = None
        self.is_invalid = False
        self.recorded: list[Any] = []
        self.uses = 1
        self.keeps_pool = version < (2, 14)
        self.ends_pool = version >= (2, 13)
        self.generator_captures = False
        cuda = self

        class Generator:
            def __init__(self, name: str) -> None:
                self.name = name

            def clone_state(self) -> "Generator":
                assert cuda.capturing is None
                return Generator("layer")

            def graphsafe_get_state(self) -> str:
                return cuda.installed

            def graphsafe_set_state(self, state: Any) -> None:
                cuda.installed = state if isinstance(state, str) else state.name

        class Graph:
            def __init__(self) -> None:
                self.pool: Any = None
                self.uses_pool = self.ended = False

            def register_generator_state(self, state: Generator) -> None:
                assert cuda.capturing is None, "registered in a capture"
                cuda.calls.append(f"register {state.name}")

            def capture_begin(self, pool: Any = None, capture_error_mode: str = "global") -> None:
                assert capture_error_mode == "thread_local"
                assert cuda.installed == "own", "the user's state is that which a capture registers by itself"
                assert pool not in cuda.recorded, "already recording to mempool_id"
                cuda.calls.append("begin" if pool else "begin without a pool")
                cuda.capturing, self.pool, cuda.generator_captures = self, pool, True
                if pool is not None:
                    self.uses_pool = True
                    cuda.uses += 1
                cuda.recorded.append(pool)

            def capture_end(self) -> None:
                cuda.calls.append("end")
                was, cuda.capturing = cuda.capturing, None
                if was is not self or cuda.is_invalid:
                    cuda.is_invalid = False
                    if was is self and cuda.ends_pool:
                        cuda.recorded.remove(self.pool)
                        cuda.generator_captures = False
                    raise RuntimeError("operation failed due to a previous error during capture")
                cuda.recorded.remove(self.pool)
                cuda.generator_captures, self.ended = False, True

            def replay(self) -> None:
                assert self.ended
                cuda.calls.append("replay")

            def reset(self) -> None:
                if self.uses_pool and (self.ended or not cuda.keeps_pool):
                    cuda.uses, self.uses_pool = cuda.uses - 1, False

        class MemPool:
            id = (0, 7)

            def use_count(self) -> int:
                return cuda.uses

        self.generator, self.graph_class, self.pool_class = Generator, Graph, MemPool

    def end_allocate(self, device: int, pool: Any) -> None:
        if pool not in self.recorded:
            raise RuntimeError("not currently recording to mempool_id")
        self.recorded.remove(pool)

    def release(self, device: int, pool: Any) -> None:
        self.uses -= 1


@pytest.fixture(params=[(2, 11), (2, 13), (2, 15)], ids=str)
def cuda(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Cuda:
    cuda = Cuda(request.param)
    monkeypatch.setattr(torch_private, "_VERSION", request.param)
    monkeypatch.setattr(torch.cuda, "default_generators", (cuda.generator("default"),))
    monkeypatch.setattr(torch.cuda, "CUDAGraph", cuda.graph_class)
    monkeypatch.setattr(torch.cuda, "MemPool", cuda.pool_class)
    monkeypatch.setattr(torch.cuda, "device", lambda device: warnings.catch_warnings())
    names = {
        "_cuda_clearCublasWorkspaces": lambda: cuda.calls.append("clear"),
        "_cuda_endAllocateToPool": cuda.end_allocate,
        "_cuda_releasePool": cuda.release,
    }
    for name, function in names.items():
        monkeypatch.setattr(torch._C, name, function, raising=False)
    return cuda


def made() -> tuple[Graph, list[RandomState]]:
    graphs = Graphs(CARD)
    return graphs.graph(), [graphs.state()]


def test_a_capture_has_its_states_and_no_workspace_of_another_one(cuda: Cuda) -> None:
    graph, states = made()
    with graph.capture(states):
        states[0].use()
        assert cuda.installed == "layer"
        assert device_graphs.device_generator(CARD).lock.acquire()  # this thread may draw, no other one
        device_graphs.device_generator(CARD).lock.release()
    graph.replay()
    registered = ["register layer"] if torch_private._VERSION < (2, 14) else []
    assert cuda.calls == [*registered, "clear", "begin", "end", "clear", "replay"]
    assert (cuda.installed, cuda.uses, cuda.recorded) == ("own", 2, [])


@pytest.mark.parametrize("refused", ["by a layer", "by CUDA", "and the layer goes on"])
def test_after_a_capture_that_has_failed_all_is_as_before(cuda: Cuda, refused: str) -> None:
    graph, states = made()

    def refuse() -> None:
        states[0].use()
        cuda.is_invalid = refused != "by a layer"
        if refused != "and the layer goes on":
            raise ValueError(refused)

    told = "operation failed" if "goes on" in refused else refused
    with pytest.raises((ValueError, RuntimeError), match=told), graph.capture(states):
        refuse()
    graph._graph.reset()  # as when it is dropped
    assert cuda.calls[-1] == "clear"
    assert (cuda.installed, cuda.uses, cuda.recorded) == ("own", 1, [])
    assert cuda.capturing is None
    assert not cuda.generator_captures


def test_the_device_has_replayed_what_is_dropped(cuda: Cuda, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: cuda.calls.append(f"wait for {device}"))
    monkeypatch.setattr(captured_steps, "can_capture", lambda device: True)
    steps = captured_steps.CapturedSteps(frozenset({"on"}), {}, [])
    found = steps._found(())
    found.captured = CapturedStep({0: Graphs(CARD)}, DeferredBatchNorms(torch.nn.Identity()), goes_on=False)
    steps.drop()
    assert cuda.calls == ["wait for cuda:0"]
    assert found.captured is None


def test_memory_that_is_not_owned_has_the_same_numbers() -> None:
    x = torch.randn(3, 4, dtype=torch.complex64)
    for tensor in (x, x.t()[1:], x.conj(), x.conj().imag, x[:0]):
        assert torch.equal(torch_private.unowned(tensor), tensor)
        assert torch_private.unowned(tensor).stride() == tensor.stride()
