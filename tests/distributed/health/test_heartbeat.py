"""The state that a monitor shares with its threads, without the threads: each exchange is made by the test."""

import os
import threading
from typing import Any

import pytest
from torch.distributed import HashStore

from pipework.distributed.health.detection_times import DetectionTimes
from pipework.distributed.health.heartbeat import Heartbeat
from pipework.distributed.health.process_calls import ProcessCalls, ProcessPlace
from pipework.distributed.health.progress import Progress
from pipework.distributed.health.status import PeerFailure, read_beat
from pipework.distributed.health.store_client import StoreClient


def heartbeats(count: int) -> list[Heartbeat]:
    store = HashStore()
    times = DetectionTimes(beat=0.1, detect=2.0, poll=0.05, join=60.0, action_timeout=None)
    names = [f"rank {rank}" for rank in range(count)]
    return [
        Heartbeat(
            StoreClient(store),
            rank,
            names,
            range(count),
            Progress(),
            times,
            lambda: None,
            ProcessCalls().of_pipe(1),
            lingers=False,
        )
        for rank in range(count)
    ]


def test_each_heartbeat_has_another_number() -> None:
    first, second = heartbeats(2)
    numbers = []
    for _ in range(3):
        first._publish_beat()
        beat = read_beat(second._client.read("heartbeat/0"))
        assert beat is not None
        numbers.append(beat.number)
    assert numbers == [1, 2, 3]
    assert not second.detector.has_seen_all
    second._check_others()
    assert second.detector.has_seen_all


@pytest.mark.parametrize(("kind", "pipe"), [("disagreement", 1), ("lost", 0)])
def test_the_last_heartbeat_says_in_which_call_of_all_pipes_the_ranks_disagreed(kind: str, pipe: int) -> None:
    first, second = heartbeats(2)
    first.begin_call("training step")
    first.set_failure(PeerFailure(1, kind, "text"))
    first.end_call()
    first._publish_beat(left=True)
    beat = read_beat(second._client.read("heartbeat/0"))
    assert beat is not None
    assert not beat.call.inside
    assert beat.place == ProcessPlace(pipe, {1: 1})


def test_messages_are_read_only_after_a_change() -> None:
    first, second = heartbeats(2)
    first.messages["stop"] = "SIGTERM"
    first._publish_changes(again=False)
    second._read_changes()
    assert second.received == {0: {"stop": "SIGTERM"}}
    answered = second._client.answered
    second._read_changes()
    assert second._client.answered == answered + 1  # the key `changed` alone
    answered = first._client.answered
    first._publish_changes(again=True)
    assert first._client.answered == answered  # nothing new


def test_an_exception_is_the_cause_of_what_else_is_reported() -> None:
    first, second, third = heartbeats(3)
    first.own_report = PeerFailure(1, "lost", "rank 1 is gone")
    second.own_report = PeerFailure(1, "error", "rank 1 failed: ValueError: no")
    for each in (first, second):
        each._publish_changes(again=False)
        assert each.report_written.is_set()
    third._read_changes()
    assert third.failure == second.own_report
    assert not third.set_failure(first.own_report)
    third._publish_changes(again=False)
    assert first._client.read("acknowledged/2") == b"1"


def test_a_failure_that_was_overwritten_is_written_again() -> None:
    first, second = heartbeats(2)
    first.own_report = PeerFailure(0, "error", "rank 0 failed")
    first._publish_changes(again=False)
    second._client.write("failure/0", "garbage")
    second._read_changes()
    assert second.failure is None
    first._publish_changes(again=True)
    second._read_changes()
    assert second.failure == first.own_report


def test_of_two_threads_that_report_at_once_the_first_one_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    reports: list[PeerFailure] = []

    def look(_: Heartbeat) -> PeerFailure | None:
        found = reports[-1] if reports else None
        if not reports and threading.current_thread() is not second:
            second.start()
            second.join(0.1)
        return found

    def note(_: Heartbeat, failure: PeerFailure | None) -> None:
        reports.extend([] if failure is None else [failure])

    monkeypatch.setattr(Heartbeat, "own_report", property(look, note), raising=False)
    (heartbeat,) = heartbeats(1)
    heartbeat.report_written.set()  # nobody writes, so nobody is to wait
    failures = [PeerFailure(0, "error", text) for text in ("rank 0 failed", "rank 0 is stuck")]
    second = threading.Thread(target=heartbeat.publish, args=(failures[1],))
    heartbeat.publish(failures[0])
    second.join()
    assert reports == failures[:1]


@pytest.mark.parametrize("inside", [True, False])
def test_what_a_thread_finds_is_logged_if_no_call_raises_it(inside: bool, caplog: Any) -> None:
    (first, _) = heartbeats(2)
    first.call = first.call.begun("training step") if inside else first.call
    first.declare(PeerFailure(1, "lost", "rank 1 lost"))
    assert first.own_report == first.failure == PeerFailure(1, "lost", "rank 1 lost")
    assert ("The next call of the pipe raises this" in caplog.text) == (not inside)
    assert first.error().rank == 1


def test_threads_do_not_keep_what_the_callers_variables_hold(variables_given: list[bool]) -> None:
    (heartbeat,) = heartbeats(1)
    heartbeat.start()
    heartbeat.begin_call("training step")
    heartbeat.end_process_if_stuck(60.0, lambda: None)
    heartbeat.leave(os.getpid())
    assert variables_given == [False, False, False]
