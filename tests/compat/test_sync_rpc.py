"""The old `Pipe` asks for RPC, and what it returns can be fetched by another RPC worker."""

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

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
def test_another_worker_fetches_the_output_and_sends_gradients_back(tmp_path: Path, start_python: Any) -> None:
    rendezvous = (tmp_path / "rendezvous").as_uri()
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "PYTHONWARNINGS": "error"}
    workers = [start_python([SCRIPT, str(rank), rendezvous], env=environment) for rank in range(2)]
    ended = [worker.ended(100) for worker in workers]
    assert [each.returncode for each in ended] == [0, 0], ended
    assert ended[0].stdout == "all is well\n"
