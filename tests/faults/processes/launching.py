"""The script, started by torchrun."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import pipework

SCRIPT = Path(__file__).with_name("script.py")
LIMIT = 90.0  # seconds after which something is not slow but broken


class Launch:
    """A running torchrun, in a session of its own."""

    def __init__(self, folder: Path, ranks: int, restarts: int, fault: str, options: list[str]) -> None:
        self.folder = folder
        self._log = folder / "log.txt"
        with self._log.open("w") as log:
            self.process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)),
                    *("--max-restarts", str(restarts), str(SCRIPT), str(folder), *options),
                ],
                stdout=log,
                stderr=log,
                start_new_session=True,
                env={
                    **os.environ,
                    "PYTHONPATH": str(Path(pipework.__file__).parent.parent),
                    "OMP_NUM_THREADS": "1",
                    "PIPEWORK_FAULT": fault,
                },
            )

    @property
    def log(self) -> str:
        return self._log.read_text()

    def wait(self) -> int:
        """The exit code of the launcher."""
        return self.process.wait(LIMIT)

    def until(self, name: str) -> str:
        """What a rank has noted under a name, as soon as it has."""
        deadline = time.monotonic() + LIMIT
        while not (self.folder / name).exists():
            assert self.process.poll() is None, self.log
            assert time.monotonic() < deadline, self.log
            time.sleep(0.02)
        return (self.folder / name).read_text()

    def left_over(self) -> list[int]:
        """The processes that are still there; ranks have sessions of their own, but all were given the folder."""
        found = []
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            with contextlib.suppress(OSError):
                if str(self.folder).encode() in path.read_bytes().split(b"\0"):
                    found.append(int(path.parent.name))
        return found

    def end(self) -> None:
        for _ in range(3):
            for pid in self.left_over():
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
        self.process.wait()


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Callable[..., Launch]]:
    launched: list[Launch] = []

    def start(*options: str, ranks: int = 2, restarts: int = 0, fault: str = "", name: str = "run") -> Launch:
        folder = tmp_path / name
        folder.mkdir()
        launched.append(Launch(folder, ranks, restarts, fault, list(options)))
        return launched[-1]

    yield start
    for each in launched:
        each.end()
