"""In which steps a check is made that costs too much for every step."""

from __future__ import annotations

from typing import Final

FIRST: Final = 4  # so many steps, in which most mistakes are there already
EACH: Final = 32  # of later steps, for what goes apart slowly


def is_checked(number: int) -> bool:
    """Whether a step is checked.

    Args:
        number: of the steps before, of the kind that is checked.

    Example:
        >>> [number for number in range(70) if is_checked(number)]
        [0, 1, 2, 3, 31, 63]
    """
    return number < FIRST or (number + 1) % EACH == 0
