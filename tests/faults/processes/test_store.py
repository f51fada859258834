"""The store through which all ranks talk ends, as with its launcher: all of them know within `detect` and a second."""

import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from pipework import Mesh
from tests.faults.processes.launching import Launch
from tests.faults.processes.training import DETECT, PATIENCE, note_strike, noting, outcome, small_pipe
from tests.jobs import Job

SERVER = """
import time
from torch.distributed import TCPStore
store = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
print(store.port, flush=True)
time.sleep(3600)
"""


@pytest.fixture
def server() -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen([sys.executable, "-c", SERVER], stdout=subprocess.PIPE, text=True)
    yield process
    process.kill()
    process.communicate()


def trains(mesh: Mesh, folder: str, steps: int) -> int:
    pipe, x = small_pipe(mesh), torch.randn(4, 8)
    with noting(folder, mesh.rank):
        for step in range(steps):
            pipe(x, target=x).backward()
            Path(folder, f"step.{mesh.rank}").write_text(str(step))
            time.sleep(0.01)
    return steps


def started(start: Callable[..., Job], server: subprocess.Popen[str], folder: Path, steps: int) -> tuple[Job, str]:
    """A job whose store is in this server, in the middle of its training."""
    assert server.stdout is not None
    port = server.stdout.readline().strip()
    environment = {"MASTER_PORT": port}
    job = start(2, trains, init={"detect": DETECT}, environment=environment, folder=str(folder), steps=steps)
    while len(list(folder.glob("step.*"))) < 2 and all(each.poll() is None for each in job.processes):
        time.sleep(0.05)
    return job, port


@pytest.mark.thorough
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_the_launcher_dies_or_stands_still(
    start: Callable[..., Job], server: subprocess.Popen[str], tmp_path: Path, how: signal.Signals
) -> None:
    job, port = started(start, server, tmp_path, 10**6)
    note_strike(str(tmp_path), "store")
    server.send_signal(how)
    found = outcome(job, tmp_path)
    assert found.raised.keys() == {0, 1}, [each.errors for each in found.ended]
    # Who sees it first ends its connections, and cannot tell the other any more why.
    assert any(error.rank is None and f"the store at 127.0.0.1:{port}" in error.text for error in found.raised.values())
    assert {error.kind for error in found.raised.values()} == {"lost"}
    assert found.seconds <= (DETECT + 1) * PATIENCE
    assert [each.code for each in found.ended] == [72, 72]


def test_a_store_that_comes_back_in_time(
    start: Callable[..., Job], server: subprocess.Popen[str], tmp_path: Path
) -> None:
    job, _ = started(start, server, tmp_path, 200)
    server.send_signal(signal.SIGSTOP)
    time.sleep(DETECT / 2)
    server.send_signal(signal.SIGCONT)
    found = outcome(job, tmp_path)
    assert not found.raised
    assert [(each.code, each.result) for each in found.ended] == [(0, 200), (0, 200)]


def test_torchrun_is_killed(launch: Callable[..., Launch]) -> None:
    """Its ranks do not live on without it."""
    launched = launch("--steps", "100000", "--pause", "0.05", "--detect", str(DETECT))
    launched.until("step.0.0")
    launched.until("step.0.1")
    assert len(launched.left_over()) == 3
    launched.process.kill()
    launched.process.wait()
    begin = time.monotonic()
    while launched.left_over() and time.monotonic() - begin < 60:
        time.sleep(0.05)
    assert time.monotonic() - begin <= (DETECT + 1) * PATIENCE, launched.log
    assert "the store at " in launched.log
