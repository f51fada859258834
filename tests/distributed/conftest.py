"""Ranks in processes of their own, and a store that they talk through; all of them end with the test."""

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import PrefixStore, TCPStore

from pipework.distributed.health.failure_detector import DetectionTimes
from pipework.distributed.health.monitor import HealthMonitor
from tests.programs import Running

MEMBER = Path(__file__).with_name("member.py")
TIMES: dict[str, Any] = {"beat": 0.1, "detect": 2.0, "poll": 0.05}
HARD = 40.0  # seconds after which something is not slow but broken


class Member:
    """A rank in a process of its own."""

    def __init__(self, running: Running) -> None:
        self._running = running
        self.process = running.process
        self._events: list[dict[str, Any]] = []

    def until(self, event: str) -> dict[str, Any]:
        """The first event of that name."""
        deadline = time.monotonic() + HARD
        while time.monotonic() < deadline:
            if found := self.so_far(event):
                return found[0]
            time.sleep(0.01)
        raise AssertionError(f"no {event!r} within {HARD} s: {self._running.output} {self._running.errors}")

    def so_far(self, event: str) -> list[dict[str, Any]]:
        """All events of that name that have come."""
        lines = self._running.output.split("\n")[len(self._events) : -1]
        self._events += map(json.loads, lines)
        return [each for each in self._events if each["event"] == event]


@pytest.fixture
def store() -> TCPStore:
    return TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=30), wait_for_workers=False)


@pytest.fixture
def member(store: TCPStore, start_python: Callable[..., Running]) -> Callable[..., Member]:
    """Starts rank 1, or another one, of a few."""

    def start(rank: int = 1, ranks: int = 2, *, port: int = store.port, **settings: Any) -> Member:
        times = {**TIMES, **settings.pop("times", {})}
        return Member(
            start_python([MEMBER, json.dumps({"rank": rank, "ranks": ranks, "port": port, "times": times, **settings})])
        )

    return start


@pytest.fixture
def watched(store: TCPStore) -> Iterator[Callable[..., HealthMonitor]]:
    """Watches in this process."""
    monitors: list[HealthMonitor] = []

    def start(rank: int = 0, ranks: int = 2, *, through: Any = store, **times: Any) -> HealthMonitor:
        names = [f"rank {each} (stage {each})" for each in range(ranks)]
        monitor = HealthMonitor(PrefixStore("test", through), rank, names, DetectionTimes(**{**TIMES, **times}))
        monitor.start()
        monitors.append(monitor)
        return monitor

    yield start
    for each in monitors:
        each.close()


@pytest.fixture
def server() -> Iterator[tuple[subprocess.Popen[str], int]]:
    """A store in a process of its own, which may be killed."""
    code = (
        "import sys, time\nfrom datetime import timedelta\nfrom torch.distributed import TCPStore\n"
        "store = TCPStore('127.0.0.1', 0, None, True, timedelta(seconds=30), wait_for_workers=False)\n"
        "print(store.port, flush=True)\ntime.sleep(120)"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    yield process, int(process.stdout.readline())
    process.send_signal(signal.SIGKILL)
    process.wait(HARD)
    process.stdout.close()
