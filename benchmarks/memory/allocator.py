"""What the C library says is in use: the one number that does not come from PyTorch."""

from __future__ import annotations

import ctypes


class _Statistics(ctypes.Structure):
    """glibc's struct mallinfo2."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks")
    ] + [("keepcost", ctypes.c_size_t)]


def bytes_in_use() -> int | None:
    """All that malloc has given to this process and not got back; None: this C library cannot tell."""
    try:
        mallinfo = ctypes.CDLL(None).mallinfo2
    except (OSError, AttributeError, TypeError):
        return None
    mallinfo.restype = _Statistics
    statistics = mallinfo()
    return int(statistics.uordblks + statistics.hblkhd)
