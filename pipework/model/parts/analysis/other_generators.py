"""The generators of Python and of numpy, which every part that runs the forward would draw other numbers from."""

from __future__ import annotations

import contextlib
import random
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextlib.contextmanager
def generators_put_back() -> Iterator[list[str]]:
    """Puts the states of both generators back; afterwards the list names those that were drawn from.

    Example:
        >>> with generators_put_back() as drawn:
        ...     _ = random.random()
        >>> drawn
        ['random']
    """
    drawn: list[str] = []
    python, numpy = random.getstate(), _numpy()
    before = None if numpy is None else numpy.get_state(legacy=False)
    try:
        yield drawn
    finally:
        if random.getstate() != python:
            drawn.append("random")
            random.setstate(python)
        if numpy is not None and str(numpy.get_state(legacy=False)) != str(before):
            drawn.append("numpy.random")
            numpy.set_state(before)


def _numpy() -> Any:
    """`numpy.random`; None: nobody has imported it."""
    return sys.modules.get("numpy.random")
