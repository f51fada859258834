"""Where ranks come from: a process that has imported PyTorch once, which takes seconds, and forks each of them.

`python nursery.py` reads a line of JSON for each rank, and answers with its process id; a line with a process id and an
exit code follows when it has ended. All end with the standard input. What is forked here has been through nothing
but imports: it has one thread, no pipe was made, no number drawn.
"""

import contextlib
import gc
import json
import os
import select
import signal
import subprocess
import sys
import threading
from pathlib import Path
from queue import SimpleQueue

import pytest  # noqa: F401, for those who are forked
import torch

import pipework
from tests.jobs_member import Member, run_member
from tests.program import Program, run_program

ENVIRONMENT = {"PYTHONPATH": str(Path(pipework.__file__).parent.parent), "OMP_NUM_THREADS": "1"}
ENVIRONMENT |= {"TORCH_CPP_LOG_LEVEL": "FATAL"}  # PyTorch reads it when it is loaded
LOOK = 0.01  # seconds between looks for who has ended


class RankProcess:
    """A rank, as `subprocess.Popen` would have it.

    Attributes:
        returncode: None while it runs; minus the number of the signal that has ended it.
    """

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._ended = threading.Event()

    def end(self, code: int) -> None:
        self.returncode = code
        self._ended.set()

    def poll(self) -> int | None:
        return self.returncode

    def wait(self, timeout: float | None = None) -> int | None:
        self._ended.wait(timeout)
        return self.returncode

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)


class Nursery:
    """A process that forks ranks.

    Args:
        seed: of the hashes of its Python, and so of the order of its sets.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._process: subprocess.Popen[str] | None = None
        self._started: SimpleQueue[RankProcess | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._listen, name=f"nursery {seed}", daemon=True)

    def open(self) -> None:
        """Starts it, unless that was done before; what starts now is there later."""
        if self._process is None:
            self._process = subprocess.Popen(
                [sys.executable, __file__],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env={**os.environ, **ENVIRONMENT, "PYTHONHASHSEED": str(self._seed)},
            )
            self._thread.start()

    def start(self, task: Member | Program) -> RankProcess:
        """Starts a rank, or a program."""
        assert self._process is not None, "open the nursery first"
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([type(task).__name__, task._asdict()]) + "\n")
        self._process.stdin.flush()
        started = self._started.get()
        assert started is not None, "the nursery has ended"
        return started

    def close(self) -> None:
        """Ends it, and every rank."""
        if self._process is not None:
            assert self._process.stdin is not None
            self._process.stdin.close()
            self._process.wait()
            self._thread.join()
            assert self._process.stdout is not None
            self._process.stdout.close()

    def _listen(self) -> None:
        assert self._process is not None
        assert self._process.stdout is not None
        ranks: dict[int, RankProcess] = {}
        for line in self._process.stdout:
            pid, code = json.loads(line)
            if code is None:
                ranks[pid] = RankProcess(pid)
                self._started.put(ranks[pid])
            else:
                ranks.pop(pid).end(code)
        self._started.put(None)
        for rank in ranks.values():
            rank.end(-signal.SIGKILL)


def tend() -> Member | Program | None:
    """Forks whatever is asked for, until nothing more will be.

    Returns:
        In a new process, what it has to do; None in the nursery, at the end.
    """
    children: set[int] = set()
    unread = b""
    while True:
        if select.select([0], [], [], LOOK if children else None)[0]:
            read = os.read(0, 1 << 16)
            if not read:
                break
            *lines, unread = (unread + read).split(b"\n")
            for line in lines:
                pid = os.fork()
                if pid == 0:
                    kind, fields = json.loads(line)
                    return {"Member": Member, "Program": Program}[kind](**fields)
                children.add(pid)
                say(pid, None)
        for pid in list(children):
            if (status := os.waitpid(pid, os.WNOHANG))[0]:
                children.remove(pid)
                say(pid, os.waitstatus_to_exitcode(status[1]))
    for pid in children:
        with contextlib.suppress(ProcessLookupError):  # not yet the leader of a group
            os.killpg(pid, signal.SIGKILL)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    return None


def say(pid: int, code: int | None) -> None:
    os.write(1, f"{json.dumps([pid, code])}\n".encode())  # nothing stays in a buffer that a fork would copy


if __name__ == "__main__":
    torch.optim.SGD([torch.zeros(1)])  # for the first one, PyTorch imports much
    for name in pipework.__all__:
        getattr(pipework, name)
    gc.collect()
    gc.freeze()  # whoever is forked shares this memory as long as nobody touches it
    task = tend()
    if isinstance(task, Member):
        run_member(task)
    elif task is not None:
        run_program(task)
