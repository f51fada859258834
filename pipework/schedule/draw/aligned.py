"""Tables in plain text, with columns aligned left or right."""

from __future__ import annotations

from collections.abc import Sequence, Set


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
