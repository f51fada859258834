"""What tests of the adapters share: an RPC framework of this process alone, and the original libraries in another."""

import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.compat import originals


@pytest.fixture
def start_rpc(tmp_path: Path) -> Iterator[Callable[[], None]]:
    """Initialises RPC when it is called; it is shut down after the test."""
    rpc = pytest.importorskip("torch.distributed.rpc", reason="this build of torch has no distributed")
    if not torch.distributed.rpc.is_available():
        pytest.skip("this build of torch has no RPC")
    started = False

    def start() -> None:
        nonlocal started
        options = rpc.TensorPipeRpcBackendOptions(init_method=(tmp_path / "rendezvous").as_uri())
        rpc.init_rpc("worker", rank=0, world_size=1, rpc_backend_options=options)
        started = True

    with warnings.catch_warnings():
        # PyTorch's RPC uses what PyTorch's process groups warn of.
        warnings.filterwarnings("ignore", "You are using a Backend .* as a ProcessGroup", UserWarning)
        yield start
        if started:
            rpc.shutdown()


@pytest.fixture
def rpc(start_rpc: Callable[[], None]) -> None:
    """RPC has been initialised."""
    start_rpc()


@pytest.fixture(params=originals.VERSIONS)
def name(request: pytest.FixtureRequest) -> str:
    """Runs a test for torchgpipe and for fairscale."""
    return request.param


@pytest.fixture
def adapter(name: str) -> Any:
    """The adapter of one of the two, as a scenario gets it."""
    return originals.Library(name, adapted=True)


@pytest.fixture(scope="session")
def originals_process() -> Iterator[Any]:
    """Where the libraries themselves answer; started when it is asked for the first time."""
    process = originals.Originals()
    yield process
    process.close()


@pytest.fixture
def ask(name: str, originals_process: Any) -> Callable[..., Any]:
    """Asks the library itself what a scenario returns."""
    if not originals.installed(name):
        pytest.skip(f"the adapter is compared with {name} {originals.VERSIONS[name]}, which is not installed")
    return lambda scenario, *arguments: originals_process.answer(scenario, name, *arguments)


@pytest.fixture
def both(ask: Callable[..., Any], adapter: Any) -> Callable[..., tuple[Any, Any]]:
    """What a scenario returns with the library itself, and with its adapter."""
    return lambda scenario, *arguments: (ask(scenario, *arguments), originals.answer(scenario, adapter, *arguments))
