"""What ranks write to the store: each its heartbeat (`Beat`), perhaps with a failure (`PeerFailure`), as bounded JSON.

Any program that reaches the port of the store can write anything into it. So what is read is bounded in size, checked
field by field, never unpickled, and ignored as a whole if it is not what a rank writes.
"""

from __future__ import annotations

import json
import traceback
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final, NamedTuple, TypeAlias

from pipework.tracebacks import shortened

KINDS: Final = ("error", "lost", "left", "disagreement", "stuck")
"""How ranks fail; see `pipework.PipelineError`."""

REMEMBERED: Final = 8
"""Of how many of its last calls a heartbeat has the kinds: neighbours in a pipeline are at most two calls apart."""

_LIMIT: Final = 500_000  # bytes of a record, far more than a rank writes
_TEXT: Final = 4_000
_TRACEBACK: Final = 20_000


PipeCall: TypeAlias = tuple[int, int]
"""The number of a pipe, from 1, and the number of a call of it."""

NO_CALL: Final[PipeCall] = (0, 0)


class Call(NamedTuple):
    """Where a rank is in its sequence of collective calls, which must be the same on every rank.

    Attributes:
        number: how many calls it has begun.
        inside: whether it is still in the last of them.
        recent: the kinds of the last ones, such as ``"training step"``; the newest last.
    """

    number: int = 0
    inside: bool = False
    recent: tuple[str, ...] = ()

    def begun(self, what: str) -> Call:
        """The same rank in its next call."""
        return Call(self.number + 1, True, (*self.recent, what)[-REMEMBERED:])

    def ended(self) -> Call:
        """The same rank after this call."""
        return self._replace(inside=False)

    def kind(self, number: int) -> str | None:
        """The kind of the call of that number; None if it is not known, or not any more.

        Example:
            >>> call = Call().begun("training step").ended().begun("evaluation")
            >>> call.kind(1), call.kind(2), call.kind(3)
            ('training step', 'evaluation', None)
        """
        back = self.number - number
        return self.recent[-1 - back] if 0 <= back < len(self.recent) else None

    def text(self) -> str:
        """The last call.

        Example:
            >>> Call().text(), Call().begun("training step").text()
            ('call 0', 'call 1 (training step)')
        """
        return f"call {self.number}" + (f" ({self.recent[-1]})" if self.recent else "")


@dataclass(frozen=True)
class PeerFailure:
    """A failure of a rank.

    Attributes:
        rank: that failed; None: the store has failed, through which all ranks communicate.
        kind: one of `KINDS`.
        text: the whole failure in one sentence.
        where: the place, such as ``"stage 1, micro-batch 3, action F"``; None: not known.
        traceback_text: of the process that failed; empty if there is none.
    """

    rank: int | None
    kind: str
    text: str
    where: str | None = None
    traceback_text: str = ""


class Beat(NamedTuple):
    """A heartbeat: a rank is alive, what it does, and what it tells the others.

    Attributes:
        number: another one in every heartbeat.
        left: whether it is the last one, because the rank's program has ended or dropped the pipe.
        call: where the rank is.
        action: its present action, or its last one.
        pid: its process.
        host: its machine.
        reason: the exception with which its program has ended; empty if there is none.
        place: where its process is in the calls of all its pipes.
        messages: by subject, see `HealthMonitor.announce`.
        failure: that the rank reports; None: there is none.
        knows: whether the rank knows of a failure.
    """

    number: int
    left: bool
    call: Call
    action: str
    pid: int
    host: str
    reason: str = ""
    place: PipeCall = NO_CALL
    messages: Mapping[str, Any] = {}  # never changed
    failure: PeerFailure | None = None
    knows: bool = False


def describe_exception(error: BaseException) -> str:
    """The type and message of an exception, without pipework's notes: the failure has the place in a field of its own.

    Example:
        >>> describe_exception(ValueError("no"))
        'ValueError: no'
    """
    described = traceback.TracebackException(type(error), error, None)
    notes: Any = described.__notes__  # a program may have put anything there
    if isinstance(notes, list):
        described.__notes__ = [note for note in notes if not str(note).startswith("pipework: ")]
    return _cut("".join(described.format_exception_only()).strip(), _TEXT // 2)


def describe_traceback(error: BaseException) -> str:
    """The traceback of an exception, with its causes and notes, without the frames of pipework itself."""
    return _cut(shortened(error), _TRACEBACK)


def describe_action(action: object) -> str:
    """An action as text.

    Example:
        >>> from pipework.schedule import Action
        >>> describe_action(Action("B", 2, 3)), describe_action("optimizer"), describe_action(None)
        ('B of stage 2, micro-batch 3', 'optimizer', 'none yet')
    """
    kind, stage, micro_batch = (getattr(action, name, None) for name in ("kind", "stage", "micro_batch"))
    if kind is not None and stage is not None:
        return f"{kind} of stage {stage}" + ("" if micro_batch in (None, -1) else f", micro-batch {micro_batch}")
    return "none yet" if action is None else _cut(str(action), _TEXT // 4)


def write_beat(beat: Beat) -> str:
    """A heartbeat as JSON."""
    failure = None if beat.failure is None else asdict(beat.failure)
    return json.dumps({**beat._asdict(), "call": beat.call._asdict(), "failure": failure})


def read_beat(raw: bytes | None) -> Beat | None:
    """The heartbeat that a rank wrote; None for anything else.

    Example:
        >>> beat = Beat(7, False, Call().begun("evaluation"), "F of stage 0", 4711, "node0")
        >>> read_beat(write_beat(beat).encode()) == beat
        True
        >>> read_beat(b'{"number": "seven"}'), read_beat(b"cos system"), read_beat(None)
        (None, None, None)
    """
    if raw is None or len(raw) > _LIMIT:
        return None
    try:
        content = _printable(json.loads(raw))
        call, failure = content["call"], content["failure"]
        content["call"] = Call(**{**call, "recent": tuple(call["recent"])})
        content["failure"] = None if failure is None else PeerFailure(**failure)
        beat = Beat(**{**content, "place": tuple(content["place"])})
        return beat if _is_beat(beat) else None
    except (ValueError, TypeError, LookupError, RecursionError):  # no rank wrote this
        return None


def _is_beat(beat: Beat) -> bool:
    """Whether what was read has the types of what a rank writes."""
    failure = beat.failure or PeerFailure(0, "lost", "")
    pairs = [
        (beat, (int, bool, Call, str, int, str, str, tuple, dict, object, bool)),
        (beat.call, (int, bool, tuple)),
        (beat.place, (int, int)),
        (beat.call.recent, (str,) * len(beat.call.recent)),
        (asdict(failure).values(), (int | None, str, str, str | None, str)),
    ]
    typed = all(isinstance(value, kind) for values, kinds in pairs for value, kind in zip(values, kinds, strict=True))
    return typed and failure.kind in KINDS


def _printable(value: Any) -> Any:
    """A JSON value without control characters, which a terminal would obey."""
    if isinstance(value, str):
        return "".join(c if c.isprintable() or c in "\n\t" else "?" for c in value)
    if isinstance(value, dict):
        return {_printable(key): _printable(each) for key, each in value.items()}
    return list(map(_printable, value)) if isinstance(value, list) else value


def _cut(text: str, limit: int) -> str:
    """A text that is too long, without its middle: the cause is at the end, the first calls at the beginning."""
    if len(text) <= limit:
        return text
    return f"{text[: limit // 4]}\n[...]\n{text[-(limit * 3 // 4) :]}"
