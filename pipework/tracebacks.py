"""The caller's lines: tracebacks without the frames of pipework itself, and warnings that name the caller.

Where a worker's exception reaches the caller, 10 to 15 frames of pipework, and of PyTorch's calls of modules, lie
between the caller's and the layer's. With the environment variable ``PIPEWORK_FULL_TRACEBACKS=1`` all frames stay.
"""

from __future__ import annotations

import inspect
import itertools
import os
import traceback
import warnings
from pathlib import Path
from typing import Final

from pipework import torch_private

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


def shorten(error: BaseException) -> None:
    """Takes the inner frames out of an exception's traceback; the first frame and the last one stay."""
    frames, trace = [], error.__traceback__
    while trace is not None:
        frames.append(trace)
        trace = trace.tb_next
    if len(frames) < 3 or os.environ.get(VARIABLE, "") not in ("", "0"):
        return
    codes = [each.tb_frame.f_code for each in frames]
    kept = [
        each
        for each, code in zip(frames[1:-1], codes[1:-1], strict=True)
        if not is_inner(code.co_filename, code.co_name)
    ]
    for outer, inner in itertools.pairwise([frames[0], *kept, frames[-1]]):
        outer.tb_next = inner


def shortened(error: BaseException) -> str:
    """The text of an exception's traceback, with its causes and all notes; see `shorten`."""
    shorten(error)
    return "".join(traceback.format_exception(error))


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

    def __exit__(self, _: object, error: BaseException | None, trace: object) -> None:
        if error is not None:
            shorten(error)
