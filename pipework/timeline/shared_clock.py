"""What the workers of all ranks did, and when, by the clock of one of them."""

from __future__ import annotations

import json
import socket
import time
from typing import TYPE_CHECKING

from pipework.schedule import Action, Interval

if TYPE_CHECKING:
    from collections.abc import Sequence


def intervals_as_text(intervals: Sequence[Interval]) -> str:
    """One rank's intervals, with what is needed to compare its clock with others.

    On one machine all processes have the same clock. Clocks of several machines are compared by the time of day, which
    is right to the millisecond or so where it is kept by NTP.
    """
    rows = [(i.worker, str(i.action), i.start, i.end, i.memory, i.held, i.sent) for i in intervals]
    return json.dumps({"host": socket.gethostname(), "origin": time.time() - time.perf_counter(), "rows": rows})


def intervals_from_text(text: str) -> list[Interval]:
    """The intervals by this process's clock.

    Example:
        >>> intervals = [Interval(0, Action("F", 0, 3), 1.0, 2.0, 64, held=8, sent=4)]
        >>> intervals_from_text(intervals_as_text(intervals)) == intervals
        True
    """
    told = json.loads(text)
    elsewhere = told["host"] != socket.gethostname()
    shift = told["origin"] - (time.time() - time.perf_counter()) if elsewhere else 0.0
    return [
        Interval(worker, Action.parse(action), start + shift, end + shift, memory, held=held, sent=sent)
        for worker, action, start, end, memory, held, sent in told["rows"]
    ]
