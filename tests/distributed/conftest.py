"""A store that ranks talk through, and monitors of their health in this process; all of them end with the test."""

import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
from torch.distributed import PrefixStore, TCPStore

from pipework.distributed.health.failure_detector import DetectionTimes
from pipework.distributed.health.monitor import HealthMonitor

TIMES: dict[str, Any] = {"beat": 0.1, "detect": 2.0, "poll": 0.05}
HARD = 40.0  # seconds after which something is not slow but broken


def await_(condition: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + HARD
    while not (value := condition()):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return value


@pytest.fixture
def store() -> TCPStore:
    return TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=30), wait_for_workers=False)


@pytest.fixture
def watched(store: TCPStore) -> Iterator[Callable[..., HealthMonitor]]:
    """Watches in this process."""
    monitors: list[HealthMonitor] = []

    def start(rank: int = 0, ranks: int = 2, **times: Any) -> HealthMonitor:
        names = {each: f"rank {each} (stage {each})" for each in range(ranks)}
        monitor = HealthMonitor(PrefixStore("test", store), rank, names, DetectionTimes(**{**TIMES, **times}))
        monitor.start()
        monitors.append(monitor)
        return monitor

    yield start
    for each in monitors:
        each.close()
