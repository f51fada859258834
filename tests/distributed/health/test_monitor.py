"""Ranks that die, hang, or are only slow, seen by another rank: this process is rank 0."""

import signal
import subprocess
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from torch.distributed import TCPStore

from pipework import PipelineError
from pipework.distributed.health.monitor import HealthMonitor
from tests.distributed.conftest import HARD, TIMES, Member

Starting = Callable[..., Member]
Watching = Callable[..., HealthMonitor]


def together(member: Starting, watched: Watching, store: Any, **settings: Any) -> tuple[Member, HealthMonitor]:
    """Two ranks in their training steps: this one stays in its first."""
    other = member(**settings)
    other.until("started")
    monitor = watched(through=store)
    store.set("go", "1")
    monitor.begin("training step")
    return other, monitor


@pytest.mark.parametrize("kind", ["kill", "stop", "hold_gil"])
def test_a_rank_without_heartbeats_is_lost(kind: str, member: Starting, watched: Watching, store: TCPStore) -> None:
    other, monitor = together(member, watched, store, fault=f"step=8,kind={kind}")
    since = other.until("fault")["time"]
    failure = monitor.wait_for_failure(HARD)
    took = time.monotonic() - since
    assert failure is not None
    assert (failure.kind, failure.rank) == ("lost", 1)
    assert "rank 1 (stage 1) lost: no heartbeat for" in failure.text
    assert f"last action: B of stage 1, micro-batch 3 (pid {other.process.pid} on " in failure.text
    assert took > TIMES["detect"] / 2
    with pytest.raises(PipelineError, match=r"rank 1 \(stage 1\) lost") as caught:
        monitor.begin("training step")
    assert (caught.value.rank, caught.value.kind) == (1, "lost")
    if kind == "stop":  # who wakes up learns that the others have gone on without it
        other.process.send_signal(signal.SIGCONT)
        assert other.until("told")["rank"] == 1


@pytest.mark.parametrize("kind", ["sleep", "hang"])
def test_slow_but_alive_is_not_lost(kind: str, member: Starting, watched: Watching, store: TCPStore) -> None:
    other, monitor = together(member, watched, store, fault=f"step=1,kind={kind},seconds=5", steps=3, linger=1)
    other.until("survived")
    assert monitor.failure is None


@pytest.mark.parametrize("what", ["kill", "stop"])
def test_a_store_out_of_reach(
    what: str, member: Starting, watched: Watching, server: tuple[subprocess.Popen[str], int]
) -> None:
    process, port = server
    store = TCPStore("127.0.0.1", port, None, False, timedelta(seconds=30), wait_for_workers=False)
    other, monitor = together(member, watched, store, port=port)
    other.until("step")
    process.send_signal(signal.SIGKILL if what == "kill" else signal.SIGSTOP)
    failure = monitor.wait_for_failure(HARD)
    assert failure is not None
    assert (failure.kind, failure.rank) == ("lost", None)
    assert f"the store at 127.0.0.1:{port} has been out of reach for" in failure.text
    assert other.until("told")["rank"] is None
    begun = time.monotonic()
    monitor.close()
    assert time.monotonic() - begun < HARD / 4


def test_a_store_that_comes_back_in_time(
    member: Starting, watched: Watching, server: tuple[subprocess.Popen[str], int]
) -> None:
    process, port = server
    store = TCPStore("127.0.0.1", port, None, False, timedelta(seconds=30), wait_for_workers=False)
    other = member(port=port, times={"detect": 10})
    other.until("started")
    monitor = watched(through=store, detect=10)
    store.set("go", "1")
    monitor.begin("training step")
    other.until("step")
    process.send_signal(signal.SIGSTOP)
    time.sleep(3)
    process.send_signal(signal.SIGCONT)
    time.sleep(1)
    steps = len(other.so_far("step"))
    time.sleep(1)
    assert len(other.so_far("step")) > steps
    assert not other.so_far("told")
    assert monitor.failure is None


@pytest.mark.parametrize("kind", ["stop", "hold_gil"])
def test_who_did_not_run_itself_blames_nobody(kind: str, member: Starting, watched: Watching, store: TCPStore) -> None:
    """For longer than `detect`: all that it knows of the others is old when it wakes up."""
    other = member(fault=f"step=3,kind={kind},seconds=5", times={"detect": 2.5})
    other.until("started")
    monitor = watched(detect=30)
    store.set("go", "1")
    monitor.begin("training step")
    other.until("survived")
    steps = len(other.so_far("step"))
    time.sleep(2)
    assert len(other.so_far("step")) > steps
    assert not other.so_far("told")
    assert monitor.failure is None
