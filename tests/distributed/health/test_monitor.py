"""Ranks that die, hang, or are only slow, seen by another rank: this process is rank 0."""

import os
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


def test_an_action_that_takes_too_long_is_stuck(member: Starting, watched: Watching, store: TCPStore) -> None:
    together(member, watched, store, fault="step=1,kind=hang", times={"action_timeout": 1.0})
    failure = watched_failure(watched, store)
    assert (failure.kind, failure.rank, failure.where) == ("stuck", 1, "B of stage 1, micro-batch 3")
    assert "rank 1 (stage 1) is stuck: it has been busy for" in failure.text
    assert "in strike" in failure.traceback_text  # where it hangs


def watched_failure(watched: Watching, store: TCPStore) -> Any:
    """The failure as a third monitor reads it from the store, which belongs to no rank."""
    failure = watched(through=store).wait_for_failure(HARD)
    assert failure is not None
    return failure


def test_an_exception_is_told_at_once_though_its_rank_lingers(
    member: Starting, watched: Watching, store: TCPStore
) -> None:
    other, monitor = together(member, watched, store, fault="step=1,kind=raise", linger=5)
    told: list[Any] = []
    monitor.on_failure(told.append)
    failure = monitor.wait_for_failure(HARD)
    assert failure is not None
    assert (failure.kind, failure.rank) == ("error", 1)
    assert failure.where == "stage 1, micro-batch 3, action B"
    assert "rank 1 (stage 1) failed in stage 1, micro-batch 3, action B: " in failure.text
    assert "InjectedFault: injected on purpose: step=1,kind=raise" in failure.text
    assert 'member.py", line' in failure.traceback_text
    assert other.process.poll() is None  # it has not gone yet
    assert str(monitor.error()).startswith(failure.text + "\n\nthe traceback of rank 1:\n    Traceback (most recent")
    assert other.ended() == 70
    assert monitor.failure == failure
    assert told == [failure]


def test_a_rank_that_ends_too_early(member: Starting, watched: Watching, store: TCPStore) -> None:
    other, monitor = together(member, watched, store, steps=3)
    for _ in range(3):
        monitor.end()
        monitor.begin("training step")
    failure = monitor.wait_for_failure(HARD)
    assert failure is not None
    assert (failure.kind, failure.rank) == ("left", 1)
    assert failure.text == (
        "rank 1 (stage 1) left after 3 training steps, and rank 0 (stage 0) is in its 4th training step. If one has "
        "run out of data before the other, give all ranks of a pipe the same batches: a DataLoader with "
        "sampler=pipe.sampler(dataset)"
    )
    assert other.ended() == 0


def test_a_program_that_ends_with_an_error_between_steps(member: Starting, watched: Watching, store: TCPStore) -> None:
    _, monitor = together(member, watched, store, steps=1, ends_with_error=True)
    monitor.end()
    monitor.begin("training step")
    failure = monitor.wait_for_failure(HARD)
    assert failure is not None
    assert "left after 1 training step with LookupError: after the last step, and rank 0" in failure.text


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


@pytest.mark.parametrize("signals", ["SIGTERM", "SIGUSR1", "SIGTERM SIGTERM"])
def test_a_request_to_end_reaches_all_ranks(signals: str, member: Starting, watched: Watching, store: TCPStore) -> None:
    first, second = member(1, 3, linger=1), member(2, 3, linger=1)
    for each in (first, second):
        each.until("started")
    monitor = watched(0, 3)
    store.set("go", "1")
    first.until("step")
    for name in signals.split():
        os.kill(first.process.pid, getattr(signal, name))
        time.sleep(0.05)  # two signals at once are one
    if " " in signals:
        assert first.ended() == 143
        return
    reasons = {each.until("preempted")["reason"] for each in (first, second)}
    assert reasons == {f"{signals} on rank 1"}
    assert monitor.announced("preempt") == {1: signals}
    assert [first.ended(), second.ended()] == [0, 0]
    assert monitor.failure is None
