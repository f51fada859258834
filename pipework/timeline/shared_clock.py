"""Intervals of all ranks, converted to the clock of one of them."""

from __future__ import annotations

import json
import socket
import time
from typing import TYPE_CHECKING

from pipework.schedule import Action, Interval

if TYPE_CHECKING:
    from collections.abc import Sequence


def intervals_as_text(intervals: Sequence[Interval]) -> str:
    """Write the intervals of a rank, with its host and the origin of its clock.

    Processes on one host share a clock. Clocks of several hosts are compared by the time of day, which NTP keeps
    accurate to about a millisecond.
    """
    rows = [(i.worker, i.action, i.start, i.end, i.memory, i.held, i.sent) for i in intervals]
    return json.dumps({"host": socket.gethostname(), "origin": time.time() - time.perf_counter(), "rows": rows})


def intervals_from_text(text: str) -> list[Interval]:
    """Read intervals, and convert them to this process's clock.

    Example:
        >>> intervals = [Interval(0, Action("F", 0, 3), 1.0, 2.0, 64, held=8, sent=4)]
        >>> intervals_from_text(intervals_as_text(intervals)) == intervals
        True
    """
    record = json.loads(text)
    other_host = record["host"] != socket.gethostname()
    shift = record["origin"] - (time.time() - time.perf_counter()) if other_host else 0.0
    return [
        Interval(worker, Action(*action), start + shift, end + shift, memory, held=held, sent=sent)
        for worker, action, start, end, memory, held, sent in record["rows"]
    ]
