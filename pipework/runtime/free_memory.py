"""How much memory of the host is free, and the error if activations that go there need more."""

from __future__ import annotations

import re
from math import inf
from pathlib import Path
from typing import Final

from pipework.schedule.draw.units import memory_text

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


def refuse_too_little_host_memory(wanted: float) -> None:
    """Raises a MemoryError before pinned buffers of so many bytes are made, if the host has less.

    Without it the system would end the process, and say nothing.

    Example:
        >>> refuse_too_little_host_memory(4096)
    """
    free = free_host_memory()
    if wanted > free:
        sizes = memory_text(wanted, "bytes"), memory_text(free, "bytes")
        raise MemoryError(
            f"activations need {sizes[0]} of host memory, and {sizes[1]} are free: let more micro-batches stay on the "
            "devices (offload=1 or more), recompute them (checkpoint='always'), or make them smaller (more chunks)"
        )


def _number(file: Path, pattern: str) -> int | None:
    try:
        found = re.search(pattern, file.read_text(encoding="utf-8"))
    except OSError:
        return None
    return None if found is None else int(found[1])
