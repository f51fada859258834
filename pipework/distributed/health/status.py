"""What ranks tell each other about themselves, as JSON of bounded size.

Whoever reaches the port of a store can write anything into it. So what is read is bounded, checked field by field,
never unpickled, and ignored as a whole where it is not what a rank writes.
"""

from __future__ import annotations

import json
import traceback
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final, NamedTuple, TypeVar

from pipework.distributed.health.tracebacks import shortened

KINDS: Final = ("error", "lost", "left", "disagreement", "stuck")
"""How ranks fail; see `pipework.PipelineError`."""

REMEMBERED: Final = 8
"""How many of its last calls a rank tells the kinds of: neighbours in a pipeline are a call or two apart at most."""

NO_ACTION: Final = "none yet"
"""What a rank does before its first action, in words."""

_LIMIT: Final = 200_000  # bytes of a record, which is far more than a rank ever writes
_TEXT: Final = 4_000
_TRACEBACK: Final = 20_000

T = TypeVar("T")


class Call(NamedTuple):
    """Where a rank is in its sequence of collective calls, which must be the same on every rank.

    Attributes:
        number: how many it has begun.
        inside: whether it is in the last one of them.
        recent: what the last ones were, such as ``"training step"``; the newest last.
        counts: how many of each kind it has begun.
    """

    number: int = 0
    inside: bool = False
    recent: tuple[str, ...] = ()
    counts: Mapping[str, int] = {}  # never written to: `begun` makes new ones

    def begun(self, what: str) -> Call:
        """Inside the next call."""
        counts = {**self.counts, what: self.counts.get(what, 0) + 1}
        return Call(self.number + 1, True, (*self.recent, what)[-REMEMBERED:], counts)

    def ended(self) -> Call:
        """Outside again."""
        return self._replace(inside=False)

    def kind(self, number: int) -> str | None:
        """What the call of that number was; None if that is not known (any more).

        Example:
            >>> call = Call().begun("training step").ended().begun("evaluation")
            >>> call.kind(1), call.kind(2), call.kind(3)
            ('training step', 'evaluation', None)
        """
        back = self.number - number
        return self.recent[-1 - back] if 0 <= back < len(self.recent) else None

    def current(self) -> str:
        """The last call in words.

        Example:
            >>> Call().begun("training step").current()
            'its 1st training step'
        """
        what = self.recent[-1] if self.recent else "call"
        return f"its {_ordinal(self.counts.get(what, self.number))} {_noun(what)}"

    def before(self) -> str:
        """Between which calls the rank is, outside of them.

        Example:
            >>> Call().before(), Call().begun("training step").ended().before()
            ('before its first call', 'between calls, after its 1st training step')
        """
        return f"between calls, after {self.current()}" if self.recent else "before its first call"

    def total(self) -> str:
        """All calls in words.

        Example:
            >>> Call().begun("training step").ended().begun("training step").begun("clip_grad_norm_").total()
            '2 training steps, 1 call of clip_grad_norm_'
        """
        return ", ".join(f"{n} {_noun(what, several=n != 1)}" for what, n in self.counts.items()) or "no call"


class Beat(NamedTuple):
    """A rank's sign of life.

    Attributes:
        number: another one in every beat.
        left: whether it is the last one, because the rank's program has ended in order.
        call: where the rank is.
        action: what it does, or did last.
        pid: its process.
        host: its machine.
        reason: with which exception its program ended, if it has; else empty.
    """

    number: int
    left: bool
    call: Call
    action: str
    pid: int
    host: str
    reason: str = ""


@dataclass(frozen=True)
class PeerFailure:
    """What happened to a rank.

    Attributes:
        rank: which one; None: the store through which all of them talk.
        kind: one of `KINDS`.
        text: all of it in one sentence.
        where: the place, such as ``"stage 1, micro-batch 3, action F"``; None: not known.
        traceback_text: from the process where it happened; empty if there is none.
    """

    rank: int | None
    kind: str
    text: str
    where: str | None = None
    traceback_text: str = ""


def describe_exception(error: BaseException) -> str:
    """Its type and message, in one client or a few, without pipework's own notes: the place is told by itself.

    Example:
        >>> describe_exception(ValueError("no"))
        'ValueError: no'
    """
    described = traceback.TracebackException(type(error), error, None)
    notes: Any = described.__notes__  # whatever somebody has put there
    if isinstance(notes, list):
        described.__notes__ = [note for note in notes if not str(note).startswith("pipework: ")]
    return _cut("".join(described.format_exception_only()).strip(), _TEXT // 2)


def describe_traceback(error: BaseException) -> str:
    """Its traceback, with the exceptions that caused it, and its notes; without the frames of pipework itself."""
    return _cut(shortened(error), _TRACEBACK)


def describe_action(action: object) -> str:
    """What a rank does, in words.

    Example:
        >>> from pipework.schedule import Action
        >>> describe_action(Action("B", 2, 3)), describe_action("optimizer"), describe_action(None)
        ('B of stage 2, micro-batch 3', 'optimizer', 'none yet')
    """
    kind, stage, micro_batch = (getattr(action, name, None) for name in ("kind", "stage", "micro_batch"))
    if kind is not None and stage is not None:
        return f"{kind} of stage {stage}" + ("" if micro_batch in (None, -1) else f", micro-batch {micro_batch}")
    return NO_ACTION if action is None else _cut(str(action), _TEXT // 4)


def write_beat(beat: Beat) -> str:
    """As JSON."""
    return json.dumps({**beat._asdict(), "call": beat.call._asdict()})


def read_beat(raw: bytes | None) -> Beat | None:
    """What a rank wrote; None for anything else.

    Example:
        >>> beat = Beat(7, False, Call().begun("evaluation"), "F of stage 0", 4711, "node0")
        >>> read_beat(write_beat(beat).encode()) == beat
        True
        >>> read_beat(b'{"number": "seven"}'), read_beat(b"cos system"), read_beat(None)
        (None, None, None)
    """
    return _read(raw, _beat)


def write_failure(failure: PeerFailure) -> str:
    """As JSON."""
    return json.dumps(asdict(failure))


def read_failure(raw: bytes | None, ranks: int) -> PeerFailure | None:
    """What a rank wrote; None for anything else.

    Example:
        >>> failure = PeerFailure(1, "lost", "rank 1 is gone")
        >>> read_failure(write_failure(failure).encode(), ranks=2) == failure
        True
        >>> read_failure(write_failure(failure).encode(), ranks=1)
    """
    failure = _read(raw, _failure)
    return failure if failure is not None and (failure.rank is None or failure.rank < ranks) else None


def read_said(raw: bytes | None) -> dict[str, Any]:
    """What a rank announced, by subject; nothing if it is no such thing.

    Example:
        >>> read_said(b'{"preempt": 3}'), read_said(b"[3]")
        ({'preempt': 3}, {})
    """
    return _read(raw, lambda content: {str(subject): value for subject, value in content.items()}) or {}


def _read(raw: bytes | None, convert: Callable[[Any], T]) -> T | None:
    if raw is None or len(raw) > _LIMIT:
        return None
    try:
        return convert(json.loads(raw))
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError):  # whatever it is, a rank wrote it not
        return None


def _beat(content: Any) -> Beat:
    call = content["call"]
    recent = tuple(_text(what, 100) for what in call["recent"][-REMEMBERED:])
    counts = {_text(what, 100): _count(n) for what, n in list(call["counts"].items())[:20]}
    return Beat(
        _count(content["number"]),
        content["left"] is True,
        Call(_count(call["number"]), call["inside"] is True, recent, counts),
        _text(content["action"], _TEXT),
        _count(content["pid"]),
        _text(content["host"], 300),
        _text(content["reason"], _TEXT),
    )


def _failure(content: Any) -> PeerFailure:
    if content["kind"] not in KINDS:
        raise ValueError(content["kind"])
    return PeerFailure(
        None if content["rank"] is None else _count(content["rank"]),
        content["kind"],
        _text(content["text"], _TEXT),
        None if content["where"] is None else _text(content["where"], _TEXT),
        _text(content["traceback_text"], _TRACEBACK + 100),
    )


def _count(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**63:
        raise ValueError(value)
    return value


def _text(value: object, limit: int) -> str:
    """Texts end on terminals, where control characters would be obeyed."""
    if not isinstance(value, str):
        raise TypeError(value)
    return "".join(c if c.isprintable() or c in "\n\t" else "?" for c in value[:limit])


def _cut(text: str, limit: int) -> str:
    """The middle of a long text is left out: the cause stands at the end, the way to it at the beginning."""
    if len(text) <= limit:
        return text
    return f"{text[: limit // 4]}\n[...]\n{text[-(limit * 3 // 4) :]}"


def _noun(what: str, *, several: bool = False) -> str:
    """What a call is, in words: a noun as it is, and the name of a function as a call of it."""
    if "_" in what:
        return f"call{'s' if several else ''} of {what}"
    return f"{what}{'s' if several else ''}"


def _ordinal(number: int) -> str:
    ending = "th" if number % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{ending}"
