"""Whether the current thread is inside a checkpointed micro-batch's first pass, or inside its recomputation."""

from __future__ import annotations

import contextlib
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


class _Phase(threading.local):
    """The phase of this thread; every thread starts with the class attributes."""

    checkpointing = False
    recomputing = False


# Layers call a plain function, which can find its worker only by the thread that it runs on.
_phase = _Phase()


def is_checkpointing() -> bool:
    """True in a layer's forward during the first pass of a checkpointed micro-batch.

    Example:
        >>> is_checkpointing()
        False
    """
    return _phase.checkpointing


def is_recomputing() -> bool:
    """True in a layer's forward while a checkpointed micro-batch is computed for the second time, for its backward.

    Example:
        >>> is_recomputing()
        False
    """
    return _phase.recomputing


@contextlib.contextmanager
def checkpointing() -> Iterator[None]:
    """Marks the first pass of a checkpointed micro-batch on this thread."""
    _phase.checkpointing = True
    try:
        yield
    finally:
        _phase.checkpointing = False


@contextlib.contextmanager
def recomputing() -> Iterator[None]:
    """Marks a recomputation on this thread."""
    _phase.recomputing = True
    try:
        yield
    finally:
        _phase.recomputing = False
