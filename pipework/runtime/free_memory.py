"""How much memory of the host is free, and the error if activations that go there need more."""

from __future__ import annotations

import os
import re
import threading
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Final

from pipework.schedule.draw.units import memory_text

if TYPE_CHECKING:
    from collections.abc import Hashable

# The limit of a container, what it has in use, and where it says how much of that is a cache of files.
_CGROUPS: Final = (
    ("memory.max", "memory.current", "memory.stat"),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat"),
)


def free_host_memory(root: Path = Path("/")) -> float:
    """The bytes of host memory that this process may still take; infinity: the system does not say.

    The least of what Linux has available and what the control group of a container allows.

    Args:
        root: the folder that has "proc" and "sys".

    Example:
        >>> free_host_memory() > 0
        True
    """
    found = [inf]
    if (size := _number(root / "proc/meminfo", r"MemAvailable:\s*([0-9]+) kB")) is not None:
        found.append(1024 * size)
    for files in _CGROUPS:
        limit, in_use, cached = (root / "sys/fs/cgroup" / name for name in files)
        most, used = _number(limit, r"([0-9]+)"), _number(in_use, r"([0-9]+)")
        if most is not None and used is not None:  # without a limit, there is a word in the file
            found.append(most - used + (_number(cached, r"(?:^|\n)inactive_file ([0-9]+)") or 0))
    return max(0.0, min(found))


def processes_on_host(otherwise: int = 1) -> int:
    """The number of processes that the launcher has started on this host.

    Args:
        otherwise: the number if no launcher says it.

    Example:
        >>> processes_on_host() > 0
        True
    """
    return int(os.environ.get("LOCAL_WORLD_SIZE", otherwise))


class HostAccount:
    """What the workers of a process have still to take of the memory of the host.

    Workers take memory in small parts, so each one alone would find enough.

    Attributes:
        share: of what all processes on this host take, the part that this process takes.

    Example:
        >>> account = HostAccount()
        >>> account.claim("worker 0", 4096)
        >>> account.took("worker 0", 1024)
    """

    def __init__(self) -> None:
        self.share = 1.0
        self._lock = threading.Lock()
        self._left: dict[Hashable, float] = {}

    def claim(self, worker: Hashable, wanted: float) -> None:
        """Before a worker takes the first part of so many bytes.

        Raises:
            MemoryError: the host has too little for all workers that have claimed memory. Without the error the system
                would end the process, and say nothing.
        """
        with self._lock:
            others = sum(size for other, size in self._left.items() if other != worker and size > 0)
            whole, free = (wanted + others) / self.share, free_host_memory()
            if whole > free:
                raise MemoryError(
                    f"activations need {memory_text(whole, 'bytes')} of host memory, and {memory_text(free, 'bytes')} "
                    "are free: let more micro-batches stay on the devices (offload=1 or more), recompute them "
                    "(checkpoint='always'), or make them smaller (more chunks)"
                )
            self._left[worker] = wanted

    def took(self, worker: Hashable, size: int) -> None:
        """After a worker has taken a part."""
        self._left[worker] -= size


def _number(file: Path, pattern: str) -> int | None:
    try:
        found = re.search(pattern, file.read_text(encoding="utf-8"))
    except OSError:
        return None
    return None if found is None else int(found[1])
