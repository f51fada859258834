"""The store through which all ranks talk ends, as with its launcher: all of them know within `detect` and a second."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from pipework import Mesh, Pipe
from tests.faults.processes.launching import Launch
from tests.faults.processes.training import DETECT, PATIENCE, mean_square, model, note_error, outcome

SERVER = """
import time
from torch.distributed import TCPStore
store = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
print(store.port, flush=True)
time.sleep(3600)
"""


def trains(mesh: Mesh, folder: str) -> None:
    pipe = Pipe(model(), chunks=2, schedule="1f1b", loss_fn=mean_square, mesh=mesh)
    x = torch.randn(4, 8)
    try:
        while True:
            pipe(x, target=x).backward()
            Path(folder, f"step.{mesh.rank}").write_text("done")
            time.sleep(0.01)
    except BaseException as error:
        note_error(folder, mesh.rank, error)
        raise


def test_the_launcher_dies(start: Callable[..., Any], tmp_path: Path) -> None:
    server = subprocess.Popen([sys.executable, "-c", SERVER], stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        port = server.stdout.readline().strip()
        job = start(2, trains, init={"detect": DETECT}, environment={"MASTER_PORT": port}, folder=str(tmp_path))
        while len(list(tmp_path.glob("step.*"))) < 2 and all(each.poll() is None for each in job.processes):
            time.sleep(0.05)
        (tmp_path / "struck.store").write_text(str(time.time()))
        os.kill(server.pid, signal.SIGKILL)
        found = outcome(job, tmp_path)
    finally:
        server.kill()
        server.communicate()
    assert found.raised.keys() == {0, 1}, [each.errors for each in found.ended]
    # Who sees it first ends its connections, and cannot tell the other any more why.
    assert any(error.rank is None and f"the store at 127.0.0.1:{port}" in error.text for error in found.raised.values())
    assert {error.kind for error in found.raised.values()} == {"lost"}
    assert found.seconds <= (DETECT + 1) * PATIENCE
    assert [each.code for each in found.ended] == [72, 72]


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
