"""What tests of the adapters share: an RPC framework of this process alone."""

import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch


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
