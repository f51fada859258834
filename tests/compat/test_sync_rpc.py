"""The old `Pipe` asks for RPC, and what it returns can be fetched by another RPC worker."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from pipework.compat.sync import Pipe

SCRIPT = Path(__file__).with_name("two_workers.py")


def test_nothing_goes_without_rpc(start_rpc: Callable[[], None]) -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    message = r"^Please initialize RPC framework for Pipe using torch\.distributed\.rpc\.init_rpc$"
    for arguments in ([module], [None, 0, "INVALID"]):
        with pytest.raises(RuntimeError, match=message):
            Pipe(*arguments)
    start_rpc()
    pipe, batches = Pipe(module, chunks=2), [torch.randn(4, 2) for _ in range(2)]
    references = [pipe(x) for x in batches]
    for x, reference in zip(batches, references, strict=True):
        assert reference.is_owner()
        torch.testing.assert_close(reference.local_value(), pipe[1](pipe[0](x)))
        assert torch.equal(reference.to_here(), reference.local_value())


@pytest.mark.thorough
def test_another_worker_fetches_the_output_and_sends_gradients_back(tmp_path: Path) -> None:
    path = os.pathsep.join(filter(None, [str(SCRIPT.parents[2]), *sys.path]))
    processes = [
        subprocess.Popen(
            [sys.executable, "-W", "error", str(SCRIPT), str(rank), (tmp_path / "rendezvous").as_uri()],
            env={**os.environ, "PYTHONPATH": path},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        told = [process.communicate(timeout=100) for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0, 0], told
    assert told[0][0] == "all is well\n"
