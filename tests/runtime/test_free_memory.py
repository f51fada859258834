from math import inf
from pathlib import Path

import pytest
import torch
from torch import nn

from pipework import Pipe
from pipework.runtime.free_memory import free_host_memory, refuse_too_little_host_memory

AVAILABLE = {"proc/meminfo": "MemTotal: 9 kB\nMemAvailable:       4 kB\n"}


@pytest.mark.parametrize(
    ("files", "free"),
    [
        ({}, inf),
        (AVAILABLE, 4096),
        ({**AVAILABLE, "memory.max": "3000", "memory.current": "2500"}, 500),
        ({"memory.max": "3000", "memory.current": "2500", "memory.stat": "anon 9\ninactive_file 7\n"}, 507),
        ({**AVAILABLE, "memory.max": "max", "memory.current": "2500"}, 4096),
        ({"memory/memory.limit_in_bytes": "30", "memory/memory.usage_in_bytes": "40"}, 0),
    ],
)
def test_what_is_free_is_the_least_of_all_limits(tmp_path: Path, files: dict[str, str], free: float) -> None:
    for name, text in files.items():
        file = tmp_path / (name if "proc" in name else f"sys/fs/cgroup/{name}")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    assert free_host_memory(tmp_path) == free


def test_a_pipe_says_at_its_first_step_that_the_host_has_too_little(monkeypatch: pytest.MonkeyPatch) -> None:
    layers = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    pipe = Pipe(layers, 8, "never", devices=["cpu"], offload=1, loss_fn=nn.functional.mse_loss)
    x = torch.zeros(80, 4)
    # Seven of eight go, each with two tensors of 160 bytes, for which there is a buffer of 1024.
    monkeypatch.setattr("pipework.runtime.free_memory.free_host_memory", lambda: 7 * 1024 - 1)
    with pytest.raises(MemoryError, match="activations need 7 KiB of host memory, and 7 KiB are free"):
        pipe(x, target=x)
    monkeypatch.setattr("pipework.runtime.free_memory.free_host_memory", lambda: 7 * 1024)
    pipe(x, target=x).backward()
    assert sum(pipe.predict(x, target=x, timeout=0).host_bytes) == 7 * 1024


def test_too_little_memory_is_said_before_it_is_taken() -> None:
    refuse_too_little_host_memory(1)
    with pytest.raises(MemoryError, match=r"activations need 9\d+ .iB of host memory, and .* are free: let more"):
        refuse_too_little_host_memory(1e18)
