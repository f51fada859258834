"""Signals that ask a process to end."""

import contextlib
import gc
import os
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from torch.distributed import HashStore

from pipework.distributed.health.monitor import HealthMonitor
from pipework.distributed.health.preemption import Preemption
from tests.distributed.conftest import HARD, await_
from tests.programs import RunPython


@pytest.fixture(autouse=True)
def usual_handlers() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)}
    yield
    assert {number: signal.getsignal(number) for number in before} == before


@contextlib.contextmanager
def installed(monitor: HealthMonitor | None = None) -> Iterator[Preemption]:
    monitor = monitor or HealthMonitor(HashStore(), 0, {0: "rank 0"})
    preemption = Preemption(monitor)
    first, second = (handled_by(number, signal.getsignal(number)) for number in (signal.SIGTERM, signal.SIGUSR1))
    with first, second:
        preemption.install()
        yield preemption


@contextlib.contextmanager
def handled_by(number: signal.Signals, handler: Any) -> Iterator[None]:
    before = signal.signal(number, handler)
    try:
        yield
    finally:
        signal.signal(number, before)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_leaves_a_mark_and_says_what_will_happen(
    number: signal.Signals, caplog: pytest.LogCaptureFixture
) -> None:
    with installed() as preemption:
        assert (preemption.requested, preemption.reason) == (False, None)
        os.kill(os.getpid(), number)
        assert preemption.requested
        assert preemption.reason == f"{number.name} on rank 0"
        await_(lambda: caplog.messages)  # a thread logs it
    assert caplog.messages == [
        f"{number.name}: training is asked to stop after this step (pipe.stopping); a second SIGTERM ends this process "
        "at once, without a checkpoint"
    ]


def test_the_deciding_rank_hears_of_a_signal_to_another(watched: Callable[..., HealthMonitor]) -> None:
    deciding = Preemption(watched(0))  # needs no handlers of its own for that
    with installed(watched(1)):
        assert not deciding.requested
        os.kill(os.getpid(), signal.SIGUSR1)
        await_(lambda: deciding.requested)
    assert deciding.reason == "SIGUSR1 on rank 1"


def test_handlers_of_the_program_are_called() -> None:
    calls: list[int] = []

    def own(number: int, frame: Any) -> None:
        calls.append(number)

    with handled_by(signal.SIGTERM, own), handled_by(signal.SIGUSR1, signal.SIG_IGN):
        with installed() as preemption:
            os.kill(os.getpid(), signal.SIGTERM)
            os.kill(os.getpid(), signal.SIGUSR1)
            assert preemption.reason == "SIGTERM on rank 0"
        assert calls == [signal.SIGTERM]


def test_other_threads_install_nothing() -> None:
    before = signal.getsignal(signal.SIGTERM)
    thread = threading.Thread(target=Preemption(HealthMonitor(HashStore(), 0, {0: "rank 0"})).install)
    thread.start()
    thread.join(HARD)
    assert signal.getsignal(signal.SIGTERM) == before


def test_the_handler_of_a_dead_pipe_is_no_native_one(caplog: pytest.LogCaptureFixture) -> None:
    """As where a script makes one pipe after the other; each handler stays, and is not to be seen as a stranger's."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)}
    try:
        for rank in range(3):
            monitor = HealthMonitor(HashStore(), 0, {0: "rank 0"})
            preemption = Preemption(monitor)
            preemption.install()
            if rank < 2:
                del monitor
                gc.collect()
                assert preemption._unused
        assert not caplog.records
        assert signal.getsignal(signal.SIGTERM) == preemption._handle
        os.kill(os.getpid(), signal.SIGTERM)
        assert preemption.requested
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


PROGRAM = """
import multiprocessing, os, signal, sys, time
from torch.distributed import HashStore
from pipework.distributed.health.monitor import HealthMonitor
from pipework.distributed.health.preemption import Preemption

def child():
    print("child", flush=True)
    time.sleep(60)

def main(what):
    monitor = HealthMonitor(HashStore(), 0, {0: "rank 0"})
    preemption = Preemption(monitor)
    preemption.install()
    if what == "twice":
        os.kill(os.getpid(), signal.SIGTERM)
        assert preemption.requested
        print("asked", flush=True)
        os.kill(os.getpid(), signal.SIGTERM)
        print("still here", flush=True)
    started = multiprocessing.get_context("fork").Process(target=child)
    started.start()
    time.sleep(0.5)
    started.terminate()
    started.join(30)
    print(started.exitcode, preemption.requested, flush=True)

main(sys.argv[1])
"""


def test_the_second_one_ends_the_process(run_python: RunPython) -> None:
    done = run_python(["-c", PROGRAM, "twice"], timeout=HARD)
    assert (done.returncode, done.stdout) == (143, "asked\n")
    assert "a second SIGTERM: ended at once, the running step and what was not saved are lost" in done.stderr


def test_a_forked_child_can_still_be_terminated(run_python: RunPython) -> None:
    """Such as the workers of a data loader, which inherit the handler."""
    done = run_python(["-c", PROGRAM, "child"], timeout=HARD)
    assert done.stdout.split() == ["child", str(-signal.SIGTERM), "False"], done.stderr
