"""Several monitors in one process: what they tell each other, what they leave behind, and what garbage does to them."""

import gc
import multiprocessing
import os
import threading
import time
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed import HashStore, PrefixStore, TCPStore

from pipework import PipelineError
from pipework.distributed.health import monitor as module
from pipework.distributed.health.failure_detector import DetectionTimes, ProcessCalls
from pipework.distributed.health.monitor import HealthMonitor
from pipework.distributed.health.status import NO_CALL, PeerFailure, read_beat
from tests.distributed.conftest import HARD, TIMES, await_
from tests.programs import RunPython

Watching = Callable[..., HealthMonitor]


def awaited(monitor: HealthMonitor) -> PeerFailure:
    """The failure that this monitor is told of."""
    failure = monitor.wait_for_failure(HARD)
    assert failure is not None
    return failure


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("pipework monitor")]


def test_another_kind_of_call_that_is_over(watched: Watching) -> None:
    """The first stage of a pipeline need not wait for an evaluation to end, and goes on to the next call."""
    first, second = watched(0), watched(1)
    first.begin("evaluation")
    first.end()
    first.begin("training step")
    second.begin("training step")
    failure = awaited(second)
    assert failure.kind == "disagreement"
    assert "call 1 is 'evaluation' on rank 0" in failure.text


@pytest.mark.thorough
def test_who_is_ahead_or_behind_or_leaves_after_the_same_calls_is_no_failure(watched: Watching) -> None:
    first, second = watched(0), watched(1)
    for _ in range(3):
        first.begin("training step")
        first.end()
    second.begin("training step")
    time.sleep(1.2 * TIMES["detect"])
    for _ in range(2):
        second.end()
        second.begin("training step")
    first.close()
    time.sleep(1.2 * TIMES["detect"])
    assert (first.failure, second.failure) == (None, None)


def test_who_leaves_in_the_middle(watched: Watching) -> None:
    first, second = watched(0), watched(1)
    for monitor in (first, second):
        monitor.begin("training step")
    first.close()
    call = "call 1 (training step)"
    assert awaited(second).text == f"rank 0 (stage 0) left in the middle of {call}, and rank 1 (stage 1) is in {call}"


def test_all_ranks_hear_of_the_first_failure(watched: Watching) -> None:
    """It is the reason why a connection was closed, too."""
    monitors = [watched(rank, 4) for rank in range(4)]
    with pytest.raises(KeyError) as caught:
        {}["no such column"]
    caught.value.add_note("of the table")
    monitors[2].report(caught.value, "stage 2, micro-batch 0, action F")
    for rank in (0, 1, 3):
        failure = awaited(monitors[rank])
        assert (failure.rank, failure.kind) == (2, "error")
        assert failure.traceback_text.rstrip().endswith("KeyError: 'no such column'\nof the table")
        assert monitors[rank].explain_disconnect(2) == failure
        monitors[rank].report(monitors[rank].error())  # which is not told again
    assert monitors[2].failure is None
    with pytest.raises(PipelineError, match=r"this pipe has failed before, and cannot go on: .*KeyError"):
        monitors[2].begin("training step")


@pytest.mark.parametrize(
    ("culprits", "reports", "rank", "kind"),
    [
        ({1: 2}, False, 2, "lost"),  # rank 2 is gone, which rank 1 has seen and rank 0 has not
        ({1: 1}, True, 1, "error"),  # who blames itself tells why
        ({0: 1, 1: 0}, False, 1, "lost"),  # as when the network between them is cut
    ],
)
def test_who_closes_a_connection_has_blamed_somebody_before(
    watched: Watching, culprits: dict[int, int], reports: bool, rank: int, kind: str
) -> None:
    monitors = [watched(each, 3) for each in range(3)]
    for each, culprit in culprits.items():
        monitors[each].announce_culprit(culprit)
    await_(lambda: monitors[0].announced("culprit").get(1) == culprits[1])
    reporting = threading.Timer(0.6, monitors[1].report, [ValueError("bad row"), None])
    if reports:
        reporting.start()
    failure = monitors[0].explain_disconnect(1, patience=0.3)
    assert (failure.rank, failure.kind) == (rank, kind)
    if reports:
        reporting.join()
        assert failure.text == "rank 1 (stage 1) failed: ValueError: bad row"


def test_what_is_told_is_bounded(watched: Watching) -> None:
    class Odd(Exception):
        def __str__(self) -> str:
            raise RuntimeError("cannot be shown")

    def deep(depth: int) -> None:
        if depth:
            deep(depth - 1)
        raise Odd

    first, second = watched(0), watched(1)
    with pytest.raises(Odd) as caught:
        deep(100)
    caught.value.add_note("x" * 10**6 + "\x1b[31m\x00end")
    first.report(caught.value)
    failure = awaited(second)
    assert "Odd" in failure.text
    assert len(failure.traceback_text) < 30_000
    assert "Traceback" in failure.traceback_text
    assert failure.traceback_text.rstrip().endswith("?[31m?end")  # no terminal obeys it


def test_who_asks_late_is_told_at_once(watched: Watching) -> None:
    first, second = watched(0), watched(1)
    told: list[int] = []
    second.on_failure({}.__getitem__)  # which fails itself
    second.on_failure(lambda: told.append(1))
    first.report(ValueError("bad row"))
    await_(lambda: told)
    second.on_failure(lambda: told.append(2))
    assert told == [1, 2]


def test_who_did_not_run_itself_blames_nobody(watched: Watching, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a process that was stopped for longer than `detect`: what it knows of the others is old when it wakes up."""
    monitors = [watched(rank) for rank in range(2)]
    for each in monitors:
        each.begin("training step")
    await_(lambda: all(each.has_seen_all for each in monitors))
    slept = [0.0]
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + slept[0], sleep=time.sleep)
    monkeypatch.setattr(module, "time", clock)
    for _ in range(3):
        slept[0] += 10 * TIMES["detect"]
        time.sleep(3 * TIMES["beat"])
    assert [each.failure for each in monitors] == [None, None]


@pytest.mark.thorough
def test_a_broken_connection_is_made_anew(watched: Watching, caplog: Any) -> None:
    first, second = watched(0, detect=10), watched(1, detect=10)
    first.announce("too much", "x" * 9_000_000)  # the server closes the connection of who sends that much
    time.sleep(1)
    del first._messages["too much"]
    time.sleep(1)
    first.announce("little", 1)
    assert await_(lambda: second.announced("little")) == {0: 1}
    assert (first.failure, second.failure) == (None, None)


def test_a_closed_watch_ends_its_threads(store: TCPStore) -> None:
    earlier = set(threads())
    monitor = HealthMonitor(PrefixStore("closed", store), 0, {0: "rank 0"}, DetectionTimes(**TIMES))
    monitor.start()
    assert len(set(threads()) - earlier) == 2
    alive = weakref.ref(monitor)
    for _ in range(2):  # once more does nothing
        monitor.close()
    assert not set(threads()) - earlier
    monitor.report(ValueError("nobody hears it"))
    del monitor
    gc.collect()
    assert alive() is None


def forked(monitor: HealthMonitor) -> None:
    monitor.announce("child")
    monitor.report(ValueError("of the child"))
    monitor.close()
    os._exit(0 if not threads() else 1)


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_child_neither_beats_nor_leaves(watched: Watching) -> None:
    first, second = watched(0), watched(1)
    first.begin("training step")
    child = multiprocessing.get_context("fork").Process(target=forked, args=(second,))
    child.start()
    child.join(HARD)
    assert child.exitcode == 0
    time.sleep(3 * TIMES["beat"])
    assert (first.failure, second.failure) == (None, None)
    second.close()
    assert awaited(first).kind == "left"  # the connection has survived the child's end


DROPPED = """
import threading, time, weakref
from torch.distributed import HashStore
from pipework.distributed.health.monitor import HealthMonitor
from pipework.distributed.health.status import Beat, Call, PeerFailure, write_beat

class Groups:
    def __del__(self):
        destroying.set()
        time.sleep(1)
        print("destroyed", flush=True)

class Pipe:
    def __init__(self):
        self.groups = Groups()  # they outlive the finalizer of the pipe

destroying, store = threading.Event(), HashStore()
monitor, pipes = HealthMonitor(store, 0, {0: "rank 0", 1: "rank 1"}), [Pipe()]
weakref.finalize(pipes[0], monitor.close)
monitor.on_failure(pipes.pop)
monitor.start()
failure = PeerFailure(1, "error", "rank 1 failed")
store.set("heartbeat/1", write_beat(Beat(1, False, Call(), "", 1, "host", failure=failure)))
store.set("changed", "1")
destroying.wait()
"""


@pytest.mark.thorough
def test_a_pipe_that_a_monitors_thread_drops_is_destroyed_before_the_interpreter_ends(run_python: RunPython) -> None:
    """Else the process groups, which are destroyed with the pipe, would abort the process."""
    done = run_python(["-c", DROPPED], timeout=HARD)
    assert (done.returncode, done.stdout) == (0, "destroyed\n"), done.stderr


# ---- without threads: each exchange is made by the test -------------------------------------------------------------


def monitors(count: int) -> list[HealthMonitor]:
    store = HashStore()
    return [monitor(store, rank, count) for rank in range(count)]


def monitor(store: HashStore | PrefixStore, rank: int, ranks: int, calls: ProcessCalls | None = None) -> HealthMonitor:
    names = {each: f"rank {each}" for each in range(ranks)}
    return HealthMonitor(store, rank, names, DetectionTimes(**TIMES), calls=calls)


def in_three_pipes() -> list[list[HealthMonitor]]:
    """For each pipe the monitors of two ranks, which have published a heartbeat."""
    store, every = HashStore(), [ProcessCalls(), ProcessCalls()]
    pipes = [[monitor(PrefixStore(str(pipe), store), rank, 2, every[rank]) for rank in (0, 1)] for pipe in (1, 2, 3)]
    for each in (each for pipe in pipes for each in pipe):
        each._publish()
    return pipes


@pytest.mark.parametrize("left", [False, True])
def test_ranks_that_call_pipes_in_another_order_see_it_even_if_one_has_gone_on(left: bool) -> None:
    """The first to see it leaves its call before a heartbeat of the pipe in which the other one waits."""
    pipes = in_three_pipes()
    pipes[0][0].begin("training step")
    pipes[1][1].begin("training step")
    pipes[0][0]._publish()
    pipes[1][1]._publish()
    pipes[1][0]._publish()  # as before the call: that this rank is in another one comes later
    (_, waits), (leaves, _) = pipes[1], pipes[0]
    pipes[0][1]._publish()
    leaves._read_others()
    assert leaves.failure is not None
    assert leaves.failure.kind == "disagreement"
    leaves.end()
    pipes[2][0].begin("training step")  # of other pipes it may go on
    pipes[2][0].end()
    pipes[1][0]._publish(left=left)
    waits._read_others()
    assert waits.failure is not None
    assert "rank 1 waits in call 1 of pipe 2, and rank 0 in call 1 of pipe 1, which" in waits.failure.text
    for pipe in (0, 2):
        pipes[pipe][0]._publish()
        beat = read_beat(pipes[pipe][1]._client.read("heartbeat/0"))
        assert beat is not None
        assert tuple(beat.place) == NO_CALL


def test_ranks_may_go_on_with_another_pipe_after_a_failure_in_an_earlier_call() -> None:
    """One has failed in a call of which the other one has gone on to the next, and is in the next pipe already."""
    (first, fails), (behind, ahead), _ = in_three_pipes()
    fails.begin("evaluation")
    fails.own_report = PeerFailure(1, "error", "text")
    fails.end()
    fails._publish()
    ahead.begin("evaluation")
    first.begin("evaluation")
    first.end()
    first.begin("evaluation")
    behind._publish()
    ahead._read_others()
    assert ahead.failure is None
    first._read_others()
    assert first.failure == fails.own_report
    first.end()
    behind._publish()
    ahead._read_others()
    assert ahead.failure is None


def test_the_third_rank_of_a_circle_sees_it_even_if_both_others_have_gone_on() -> None:
    """Each rank calls another pipe. Two of them see each other, and leave."""
    store, every = HashStore(), [ProcessCalls() for _ in range(3)]
    pipes = [[monitor(PrefixStore(str(pipe), store), rank, 3, every[rank]) for rank in range(3)] for pipe in range(3)]
    for rank in range(3):
        pipes[rank][rank].begin("training step")
    for rank in (0, 1):
        pipes[rank][rank].set_failure(PeerFailure(1 - rank, "disagreement", "text"))
        pipes[rank][rank].end()
        pipes[2][rank]._publish()
    waits = pipes[2][2]
    waits._read_others()
    assert waits.failure is not None
    assert "rank 2 waits in call 1 of pipe 3, and rank 0 in call 1 of pipe 1, which" in waits.failure.text


def test_a_rank_whose_call_was_refused_accuses_none_that_came_earlier() -> None:
    """It comes to the pipe that has failed, and goes on to another, where it waits for a rank that is not there yet."""
    (failed, late), (first, second), _ = in_three_pipes()
    failed.begin("training step")
    failed.own_report = PeerFailure(0, "error", "text")
    failed.end()
    late.set_failure(failed.own_report)
    with pytest.raises(PipelineError, match="text"):
        late.begin("training step")
    first._publish()
    second.begin("training step")
    second._read_others()
    assert second.failure is None


def test_a_pipe_that_is_called_after_a_failure_has_its_own_place() -> None:
    calls = ProcessCalls()
    first, second = calls.add(), calls.add()
    calls.begin(first)
    calls.end(failed=True)
    assert (calls.place(first), calls.place(second)) == (NO_CALL, (first, 1))
    calls.begin(second)
    assert calls.place(second) == (second, 1)
    calls.end()
    assert calls.place(second) == NO_CALL


def test_only_news_are_read_at_once() -> None:
    first, second = monitors(2)
    first._publish()
    assert second._client.read("changed") is None
    first._messages["stop"] = "SIGTERM"
    for _ in range(2):
        first._publish()
        assert second._client.read("changed") == b"0:2"
    second._read_others()
    assert second.announced("stop") == {0: "SIGTERM"}


def test_an_exception_is_the_cause_of_what_else_is_reported() -> None:
    first, second, third = monitors(3)
    first.own_report = PeerFailure(1, "lost", "rank 1 is gone")
    second.own_report = PeerFailure(1, "error", "rank 1 failed: ValueError: no")
    for each in (first, second):
        each._publish()
        assert each._report_written.is_set()
    third._read_others()
    assert third.failure == second.own_report
    assert not third.set_failure(first.own_report)
    third._publish()
    beat = read_beat(first._client.read("heartbeat/2"))
    assert beat is not None
    assert beat.knows


def test_a_failure_that_was_overwritten_is_written_again() -> None:
    first, second = monitors(2)
    first.own_report = PeerFailure(0, "error", "rank 0 failed")
    first._publish()
    second._client.write("heartbeat/0", "garbage")
    second._read_others()
    assert second.failure is None
    first._publish()
    second._read_others()
    assert second.failure == first.own_report


def test_threads_do_not_keep_what_the_callers_variables_hold(variables_given: list[bool]) -> None:
    (monitor,) = monitors(1)
    monitor.start()
    monitor.begin("training step")
    monitor.end_process_if_stuck(60.0, lambda: None)
    monitor.close()
    assert variables_given == [False, False, False]


@pytest.mark.parametrize("inside", [True, False])
def test_what_is_raised_is_not_logged_before(inside: bool, caplog: pytest.LogCaptureFixture) -> None:
    """The program raises a failure in the call that it is in; outside of calls it would hear of it late."""
    monitor, _ = monitors(2)
    if inside:
        monitor.begin("training step")
        monitor.on_failure(monitor.end)  # as the program does that raises it
    monitor.declare(PeerFailure(1, "lost", "rank 1 lost"))
    told = [record.getMessage() for record in caplog.records]
    assert told == ([] if inside else ["rank 1 lost. The next call of the pipe raises this"])
