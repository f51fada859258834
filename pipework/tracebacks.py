"""The caller's lines: tracebacks without the frames of pipework itself, and warnings that name the caller.

Where a worker's exception reaches the caller, 10 to 15 frames of pipework, and of PyTorch's calls of modules, lie
between the caller's and the layer's. With the environment variable ``PIPEWORK_FULL_TRACEBACKS=1`` all frames stay.
"""

from __future__ import annotations

import inspect
import itertools
import os
import warnings
from pathlib import Path
from traceback import TracebackException
from typing import TYPE_CHECKING, Final

from pipework import torch_private

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import TracebackType

_PACKAGE: Final = str(Path(__file__).absolute().parent) + os.sep  # links stay, as in the names of frames' files
VARIABLE: Final = "PIPEWORK_FULL_TRACEBACKS"
"""The environment variable that leaves tracebacks whole, unless it is empty or 0."""

_MODULE: Final = os.path.join("torch", "nn", "modules", "module.py")


def is_inner(file: str, function: str) -> bool:
    """Whether a frame is pipework's own, or one of those by which PyTorch calls any module.

    Args:
        file: of the function.
        function: its name.

    Example:
        >>> is_inner(__file__, "is_inner"), is_inner("train.py", "main")
        (True, False)
    """
    return file.startswith(_PACKAGE) or (function in torch_private.CALLS_OF_MODULES and file.endswith(_MODULE))


class PipeWarning(UserWarning):
    """Something that a pipe does is probably not what was meant: it runs, but slower, or on other data.

    Each is given once for a pipe, and says what to do. If it is meant, `warnings.filterwarnings` ignores it by this
    category, and by the words that it begins with if others are to be seen.

    Example:
        >>> import warnings
        >>> from torch import nn
        >>> from pipework import Pipe
        >>> with warnings.catch_warnings():
        ...     warnings.filterwarnings("ignore", "chunks is 1", PipeWarning)
        ...     pipe = Pipe(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), devices=["cpu", "cpu"])
    """

    __module__ = "pipework"  # the public name, for messages


def warn_caller(text: str) -> None:
    """Gives a `PipeWarning` at the line outside of pipework that led here.

    Args:
        text: of the warning.

    Example:
        >>> import warnings
        >>> with warnings.catch_warnings(record=True) as seen:
        ...     warnings.simplefilter("always")
        ...     warn_caller("nothing is pipelined")
        >>> seen[0].category
        <class 'pipework.PipeWarning'>
    """
    frame = inspect.currentframe()
    level = 1
    while frame is not None and is_inner(frame.f_code.co_filename, frame.f_code.co_name):
        frame, level = frame.f_back, level + 1
    warnings.warn(text, PipeWarning, stacklevel=level)


def shortened(error: BaseException) -> str:
    """An exception's traceback, with its causes and all notes, without inner frames.

    The last frame, which raised the exception, always stays.
    """
    whole = TracebackException.from_exception(error)
    for each in [] if _left_whole() else _chain(whole):
        each.stack[:] = [
            frame
            for number, frame in enumerate(each.stack, 1)
            if number == len(each.stack) or not is_inner(frame.filename, frame.name)
        ]
    return "".join(whole.format())


class ShortTracebacks:
    """A context in a function that users call: an exception leaves it with a traceback without inner frames.

    The frames of that function and of where the exception was raised stay.

    Example:
        >>> with ShortTracebacks():
        ...     raise ValueError("no root")
        Traceback (most recent call last):
        ...
        ValueError: no root
    """

    def __enter__(self) -> None:
        """Nothing is changed before there is an exception."""

    def __exit__(self, _: object, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is not None and not _left_whole():
            first, *others = _frames(trace)
            kept = [each for each in others[:-1] if not _is_inner_frame(each)]
            for outer, inner in itertools.pairwise([first, *kept, *others[-1:]]):
                outer.tb_next = inner
            error.__traceback__ = first


def _left_whole() -> bool:
    return os.environ.get(VARIABLE, "") not in ("", "0")


def _frames(trace: TracebackType | None) -> list[TracebackType]:
    frames = []
    while trace is not None:
        frames.append(trace)
        trace = trace.tb_next
    return frames


def _is_inner_frame(trace: TracebackType) -> bool:
    code = trace.tb_frame.f_code
    return is_inner(code.co_filename, code.co_name)


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
