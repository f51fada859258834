"""The category of the warnings of a pipe, and the line at which they are given: the caller's."""

from __future__ import annotations

import inspect
import warnings

from pipework.tracebacks import is_inner


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
