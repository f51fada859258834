"""Shorter tracebacks: without the frames of pipework itself, and those by which PyTorch calls a module."""

from __future__ import annotations

import os
from pathlib import Path
from traceback import TracebackException
from types import TracebackType
from typing import TYPE_CHECKING, Final

from pipework import torch_private

if TYPE_CHECKING:
    from collections.abc import Iterator

_PACKAGE: Final = str(Path(__file__).resolve().parents[2]) + os.sep
_MODULE: Final = os.path.join("torch", "nn", "modules", "module.py")


def is_inner(file: str, function: str) -> bool:
    """Whether a frame is pipework's own, or one of those by which PyTorch calls any module.

    Example:
        >>> is_inner(__file__, "is_inner"), is_inner("train.py", "main")
        (True, False)
    """
    return file.startswith(_PACKAGE) or (function in torch_private.CALLS_OF_MODULES and file.endswith(_MODULE))


def shortened(error: BaseException) -> str:
    """An exception's traceback, with its causes and all notes, without inner frames.

    The last frame, which raised the exception, always stays.
    """
    whole = TracebackException.from_exception(error)
    for each in _chain(whole):
        each.stack[:] = [
            frame
            for number, frame in enumerate(each.stack, 1)
            if number == len(each.stack) or not is_inner(frame.filename, frame.name)
        ]
    return "".join(whole.format())


def outer_part(trace: TracebackType | None) -> TracebackType | None:
    """A copy of a traceback without inner frames; None if it has no others."""
    kept = []
    while trace is not None:
        code = trace.tb_frame.f_code
        if not is_inner(code.co_filename, code.co_name):
            kept.append(trace)
        trace = trace.tb_next
    outer = None
    for each in reversed(kept):
        outer = TracebackType(outer, each.tb_frame, each.tb_lasti, each.tb_lineno)
    return outer


def _chain(error: TracebackException) -> Iterator[TracebackException]:
    """An exception, its causes, and the members of its group."""
    seen: set[int] = set()
    left: list[TracebackException | None] = [error]
    while left:
        each = left.pop()
        if each is not None and id(each) not in seen:
            seen.add(id(each))
            yield each
            left += [each.__cause__, each.__context__, *(each.exceptions or ())]
