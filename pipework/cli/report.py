"""The result of a command."""

from __future__ import annotations

from typing import NamedTuple


class Report(NamedTuple):
    """Lines for the terminal, and the exit status.

    Attributes:
        lines: what to print.
        status: 0, or 1 if a check did not pass.
    """

    lines: list[str]
    status: int = 0
