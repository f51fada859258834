"""The error that names a failure in another process, and the exit codes by which a launcher tells failures apart."""

from __future__ import annotations

import textwrap
from typing import Final

LOCAL_ERROR: Final = 70
"""This process failed by itself."""

PEER_FAILED: Final = 71
"""Another process failed, and reported it."""

LOST_PEER: Final = 72
"""Another process, or the store through which all ranks communicate, disappeared without a message."""

PREEMPTED: Final = 143
"""The process was asked to end by SIGTERM; as in a shell, 128 + 15."""

_INTERRUPTED: Final = 130  # Ctrl-C, 128 + 2


class PipelineError(RuntimeError):
    """A pipeline of several processes cannot continue, because another process has failed.

    The process in which an exception arose raises that exception itself; all the others raise this error.

    Args:
        text: which rank failed, where, and how.
        rank: the rank that failed; None: the store has failed, through which all ranks communicate.
        where: the place, such as ``"stage 1, micro-batch 3, action F"``; None: not known.
        kind: ``"error"`` (an exception), ``"lost"`` (the process disappeared without a message), ``"left"`` (its
            program ended too early), ``"disagreement"`` (it makes another call than this rank) or ``"stuck"`` (it is
            alive, but one action takes too long).
        traceback_text: the traceback in the process that failed; empty if there is none.
        own: the error is about the process that raises it, as seen by its own monitor.

    Each argument is an attribute of the same name.

    Example:
        >>> from pipework.distributed.health.errors import exit_code
        >>> error = PipelineError("rank 2 (stage 2) failed: ValueError: no", rank=2, traceback_text="Traceback ...")
        >>> print(error)
        rank 2 (stage 2) failed: ValueError: no
        <BLANKLINE>
        the traceback of rank 2:
            Traceback ...
        >>> exit_code(error)
        71
    """

    __module__ = "pipework"  # the public name, for tracebacks

    def __init__(
        self,
        text: str,
        *,
        rank: int | None = None,
        where: str | None = None,
        kind: str = "error",
        traceback_text: str = "",
        own: bool = False,
    ) -> None:
        super().__init__(text)  # the only positional argument, so that copies and pickles work
        self.text = text
        self.rank = rank
        self.where = where
        self.kind = kind
        self.traceback_text = traceback_text
        self.own = own

    def __str__(self) -> str:
        if not self.traceback_text.strip():
            return self.text
        original = textwrap.indent(self.traceback_text.rstrip(), "    ")
        return f"{self.text}\n\nthe traceback of rank {self.rank}:\n{original}"


def exit_code(error: BaseException) -> int:
    """The exit code for a process that ends with an exception, so that a launcher's log shows which process failed.

    `init` has every uncaught exception end the process with this code. A program that catches exceptions itself can end
    with ``sys.exit(exit_code(error))``.

    Args:
        error: the exception that ends the process.

    Returns:
        `LOST_PEER` (72) or `PEER_FAILED` (71) for a `PipelineError` about another process, the code of a `SystemExit`,
        130 for Ctrl-C, else `LOCAL_ERROR` (70).

    Example:
        >>> exit_code(ValueError("no")), exit_code(SystemExit(3))
        (70, 3)
        >>> exit_code(PipelineError("rank 1 is gone", rank=1, kind="lost"))
        72
    """
    match error:
        case PipelineError():
            return LOCAL_ERROR if error.own else LOST_PEER if error.kind == "lost" else PEER_FAILED
        case SystemExit():
            if error.code is None:
                return 0
            return error.code if isinstance(error.code, int) else 1  # as the interpreter does
        case KeyboardInterrupt():
            return _INTERRUPTED
        case _:
            return LOCAL_ERROR
