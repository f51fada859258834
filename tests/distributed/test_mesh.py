"""What `init` refuses before any process is waited for, and what it says without a launcher."""

import warnings
from typing import Any

import pytest
import torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

import pipework
from pipework import Pipe


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"dp": 0}, "dp is the number of replicas, a positive integer: got 0"),
        ({"dp": True}, "got True"),
        ({"dp": 2.0}, "got 2.0"),
        ({"detect": 0.4}, "detect must be at least 1 second"),
        ({"detect": float("nan")}, "detect must be at least 1 second"),
        ({"action_timeout": -1}, "action_timeout must be a positive number of seconds, or None: got -1"),
        ({"timeout": 0}, "timeout must be a positive number"),
        ({"grace": -1}, "grace must be a number of seconds, 0 or more"),
    ],
)
def test_what_makes_no_sense_is_refused_without_a_launcher_too(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        pipework.init(**arguments)


def test_replicas_need_a_launcher(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr("sys.argv", ["/home/me/train_it.py", "--epochs", "3"])
    assert pipework.init(dp=2) is None
    assert "dp=2 has no effect: this is a single process" in caplog.text
    assert "torchrun --nproc-per-node 2 train_it.py" in caplog.text


def test_a_pipe_in_a_process_group_of_the_programs_own_is_not_doubted() -> None:
    """As for `DistributedDataParallel(pipe)`."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("error", "pipework.init")
            Pipe(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), 2)
    finally:
        dist.destroy_process_group()
