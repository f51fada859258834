from math import inf
from pathlib import Path

import pytest
import torch
from torch import nn

from pipework import Pipe
from pipework.runtime.free_memory import HostAccount, free_host_memory

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
    assert sum(pipe.predict(x, target=x, timeout=0).host_bytes) == 7 * 1024
    monkeypatch.setattr("pipework.runtime.free_memory.free_host_memory", lambda: 7 * 1024 - 1)
    with pytest.raises(MemoryError, match="activations need 7 KiB of host memory, and 7 KiB are free"):
        pipe(x, target=x)
    monkeypatch.setattr("pipework.runtime.free_memory.free_host_memory", lambda: 7 * 1024)
    pipe(x, target=x).backward()


def test_workers_need_their_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    free = 1000
    monkeypatch.setattr("pipework.runtime.free_memory.free_host_memory", lambda: free)
    account, message = HostAccount(), r"activations need 1\.17 KiB of host memory, and \d+ B are free: let more"
    account.claim(0, 600)
    for taken in (0, 300, 99):
        account.took(0, taken)
        free -= taken
        with pytest.raises(MemoryError, match=message if not taken else "are free"):
            account.claim(1, 600)
    account.took(0, 301)  # more than its first micro-batch has shown
    free -= 200
    account.claim(1, 300)
    account.share = 0.5
    with pytest.raises(MemoryError, match=message):
        account.claim(1, 600)


def test_two_workers_of_a_pipe_need_their_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    layers = [nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)) for _ in range(2)]
    pipe = Pipe(
        nn.Sequential(*layers), 8, "never", balance=[1, 1], devices=["cpu"] * 2, offload="activations",
        loss_fn=nn.functional.mse_loss,
    )  # fmt: skip
    x = torch.zeros(80, 4)
    needs = pipe.predict(x, target=x, timeout=0).host_bytes
    taken = 0

    def took(self: HostAccount, worker: int, size: int) -> None:
        nonlocal taken
        taken += size  # first, so that no claim finds both
        before(self, worker, size)

    before = HostAccount.took
    monkeypatch.setattr(HostAccount, "took", took)
    monkeypatch.setattr("pipework.runtime.free_memory.free_host_memory", lambda: sum(needs) - 1 - taken)
    monkeypatch.setattr("pipework.planning.measuring.predict.free_host_memory", lambda: max(needs))
    assert 0 < max(needs) < sum(needs)
    assert str(pipe.predict(x, target=x, timeout=0)).endswith(f"KiB; {max(needs) / 1024:.1f} KiB are free now")
    with pytest.raises(MemoryError, match="activations need"):
        pipe(x, target=x)
