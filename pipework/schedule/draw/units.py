"""Numbers with readable units, and tables in plain text."""

from __future__ import annotations

import math
from collections.abc import Sequence, Set

_SECONDS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "\u00b5s"))
_BYTES = ((1024.0**3, "GiB"), (1024.0**2, "MiB"), (1024.0, "KiB"))


def time_scale(longest: float, unit: str) -> tuple[float, str]:
    """Choose the unit for times up to ``longest``.

    Returns:
        The size of the unit in terms of ``unit``, and its name.

    Example:
        >>> time_scale(0.25, "s")
        (0.001, 'ms')
        >>> time_scale(33.0, "")
        (1.0, '')
    """
    if unit != "s":
        return 1.0, unit
    return next(((size, name) for size, name in _SECONDS if longest >= size), _SECONDS[-1])


def time_text(time: float, unit: str, longest: float | None = None) -> str:
    """A time with its unit.

    Args:
        time: in ``unit``.
        unit: ``""`` or ``"s"``.
        longest: choose the unit for this time instead, so that several times share one unit.

    Example:
        >>> time_text(0.01234, "s"), time_text(33.0, "")
        ('12.34 ms', '33')
    """
    size, name = time_scale(time if longest is None else longest, unit)
    return f"{time / size:.4g} {name}".rstrip()


def memory_text(memory: float, unit: str) -> str:
    """An amount of memory with its unit: ``"bytes"``, ``""`` or a plural noun.

    Example:
        >>> memory_text(1536, "bytes"), memory_text(8.0, ""), memory_text(1.0, "micro-batches")
        ('1.5 KiB', '8', '1 micro-batch')
    """
    if unit != "bytes":
        number = f"{memory:.4g}"
        return f"{number} {'micro-batch' if (number, unit) == ('1', 'micro-batches') else unit}".rstrip()
    size, name = next(((size, name) for size, name in _BYTES if memory >= size), (1.0, "B"))
    return f"{memory / size:.3g} {name}" if memory < 1000 * size else f"{memory / size:.0f} {name}"


def counted(count: int, noun: str) -> str:
    """A number and a noun.

    Example:
        >>> counted(1, "stage"), counted(3, "micro-batch")
        ('1 stage', '3 micro-batches')
    """
    return f"{count} {noun}{'' if count == 1 else 'es' if noun.endswith('ch') else 's'}"


def ticks(longest: float, most: int) -> list[float]:
    """At most ``most`` round numbers from 0 to ``longest``, evenly spaced.

    Example:
        >>> ticks(33.0, 8)
        [0.0, 5.0, 10.0, 15.0, 20.0, 25.0, 30.0]
    """
    if longest <= 0:
        return [0.0]
    rough = longest / max(most - 1, 1)
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * (1 - 1e-9))
    return [index * step for index in range(int(longest / step + 1e-9) + 1)]


def aligned(rows: Sequence[Sequence[str]], left: Set[int] = frozenset()) -> list[str]:
    """The lines of a table.

    Args:
        rows: the cells.
        left: the columns to align left; the others are aligned right.

    Example:
        >>> aligned([["a", "bcd"], ["10", "2"]], left={0})
        ['  a   bcd', '  10    2']
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  "
        + "  ".join(
            cell.ljust(width) if column in left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]
