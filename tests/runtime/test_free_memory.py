from math import inf
from pathlib import Path

import pytest

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


def test_too_little_memory_is_said_before_it_is_taken() -> None:
    refuse_too_little_host_memory(1)
    with pytest.raises(MemoryError, match=r"need 1000000000.0 GB of host memory, and [0-9.]+ GB are free: let more"):
        refuse_too_little_host_memory(1e18)
