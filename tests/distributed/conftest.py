"""Ranks in processes of their own, and a store that they talk through; all of them end with the test."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from queue import Empty, Queue
from typing import Any

import pytest
from torch.distributed import PrefixStore, TCPStore

from pipework.distributed.health.monitor import HealthMonitor
from tests.nursery import ENVIRONMENT

MEMBER = Path(__file__).with_name("member.py")
TIMES = {"beat": 0.1, "detect": 2.0, "poll": 0.05}
HARD = 40.0  # seconds after which something is not slow but broken


class Member:
    """A rank in a process of its own."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(MEMBER), json.dumps(settings)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **ENVIRONMENT},
        )
        self.events: list[dict[str, Any]] = []
        self.errors: list[str] = []
        self._coming: Queue[dict[str, Any]] = Queue()
        self._readers = [threading.Thread(target=self._read), threading.Thread(target=self._read_errors)]
        for reader in self._readers:
            reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._coming.put(json.loads(line))

    def _read_errors(self) -> None:
        assert self.process.stderr is not None
        self.errors += self.process.stderr

    def until(self, event: str) -> dict[str, Any]:
        """The first event of that name."""
        deadline = time.monotonic() + HARD
        while time.monotonic() < deadline:
            for each in self.events:
                if each["event"] == event:
                    return each
            try:
                self.events.append(self._coming.get(timeout=0.1))
            except Empty:
                continue
        raise AssertionError(f"no {event!r} within {HARD} s: {self.events} {self.errors}")

    def so_far(self, event: str) -> list[dict[str, Any]]:
        """All events of that name that have come."""
        while not self._coming.empty():
            self.events.append(self._coming.get())
        return [each for each in self.events if each["event"] == event]

    def ended(self) -> int:
        return self.process.wait(HARD)

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(HARD)
        for reader in self._readers:
            reader.join(HARD)
        for pipe in (self.process.stdout, self.process.stderr):
            assert pipe is not None
            pipe.close()


@pytest.fixture
def store() -> TCPStore:
    return TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=30), wait_for_workers=False)


@pytest.fixture
def member(store: TCPStore) -> Iterator[Callable[..., Member]]:
    """Starts rank 1, or another one, of a few."""
    members: list[Member] = []

    def start(rank: int = 1, ranks: int = 2, *, port: int = store.port, **settings: Any) -> Member:
        times = {**TIMES, **settings.pop("times", {})}
        members.append(Member({"rank": rank, "ranks": ranks, "port": port, "times": times, **settings}))
        return members[-1]

    yield start
    for each in members:
        each.end()


@pytest.fixture
def watched(store: TCPStore) -> Iterator[Callable[..., HealthMonitor]]:
    """Watches in this process."""
    monitors: list[HealthMonitor] = []

    def start(rank: int = 0, ranks: int = 2, *, through: Any = store, **times: Any) -> HealthMonitor:
        monitor = HealthMonitor(
            PrefixStore("test", through), rank, ranks, names="rank {0} (stage {0})".format, **{**TIMES, **times}
        )
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
