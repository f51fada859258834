"""Amounts of memory in words, such as "24GiB"."""

from __future__ import annotations

import math
import re
from types import MappingProxyType
from typing import Final

_UNITS: Final = MappingProxyType(
    {"": 1, "B": 1}
    | {f"{letter}iB": 1024**power for power, letter in enumerate("KMGT", 1)}
    | {f"{letter}B": 1000**power for power, letter in enumerate("KMGT", 1)}
)
_TEXT: Final = re.compile(r"([0-9]+(?:\.[0-9]*)?)\s*([A-Za-z]*)")


def memory_bytes(amount: float | str, what: str = "memory") -> float:
    """An amount in bytes.

    Args:
        amount: a number of bytes, or a text such as "24GiB", "500 MB".
        what: names it in messages.

    Raises:
        TypeError: it is neither a number nor a text.
        ValueError: the text is not understood, or the number is not positive.

    Example:
        >>> memory_bytes("1.5KiB"), memory_bytes("2 GB"), memory_bytes(10)
        (1536.0, 2000000000.0, 10.0)
    """
    if isinstance(amount, bool) or not isinstance(amount, int | float | str):
        raise TypeError(f"{what} is {amount!r}: wanted a number of bytes, or a text such as '24GiB'")
    size = amount
    if isinstance(amount, str):
        match = _TEXT.fullmatch(amount.strip())
        units = {name.lower(): factor for name, factor in _UNITS.items()}
        if match is None or match[2].lower() not in units:
            raise ValueError(f"{what} is {amount!r}: wanted a number and a unit, such as '24GiB', '500MB' or '1024'")
        size = float(match[1]) * units[match[2].lower()]
    if not 0 < float(size) < float("inf"):
        raise ValueError(f"{what} is {amount!r}: wanted a finite amount above 0")
    return float(size)


def memory_size(size: float) -> str:
    """A text that :func:`memory_bytes` reads: at least as many bytes, in three digits or a few more.

    Example:
        >>> memory_size(1025), memory_size(20 * 2**20), memory_size(12)
        ('1.01KiB', '20MiB', '12B')
    """
    names = [name for name in _UNITS if name == "B" or name.endswith("iB")]
    unit = max((name for name in names if _UNITS[name] <= size), key=_UNITS.__getitem__, default="B")
    return f"{math.ceil(100 * size / _UNITS[unit]) / 100:g}{unit}"
