"""Test bodies that run in several processes at once, as under torchrun but without its launcher."""

import json
import math
import os
import signal
import socket
import time
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import TCPStore

from tests.jobs_member import Member
from tests.nursery import ENVIRONMENT, Nursery

PATIENCE = 60.0  # seconds after which something is not slow but broken
AFTER_FAILURE = 20.0  # the same once a rank has failed


@dataclass(frozen=True)
class Ended:
    """How a rank has ended; after infinitely many seconds if it had to be killed."""

    code: int
    result: Any
    output: str
    errors: str
    seconds: float


class Job:
    """Ranks that run one function of the test's module.

    Their store lives in the test's process, as under torchrun in that of the launcher; or in that of rank 0.
    """

    def __init__(
        self,
        nurseries: Sequence[Nursery],
        folder: Path,
        ranks: int,
        body: Callable[..., Any],
        init: dict[str, Any],
        environment: dict[str, str],
        arguments: Any,
        *,
        own_store: bool = False,
    ) -> None:
        self.folder = folder
        self._store = None
        if own_store:
            with socket.socket() as free:
                free.bind(("127.0.0.1", 0))
                port = free.getsockname()[1]
        else:
            self._store = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
            port = self._store.port
        shared = {
            **ENVIRONMENT,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "TORCHELASTIC_USE_AGENT_STORE": str(not own_store),
            "WORLD_SIZE": str(ranks),
            "LOCAL_WORLD_SIZE": str(ranks),
            **environment,
        }
        for nursery in nurseries:
            nursery.open()
        self.processes = [
            # Sets have another order on the next rank, as in processes of their own.
            nurseries[rank % len(nurseries)].start(
                Member(
                    body.__code__.co_filename,
                    body.__name__,
                    init,
                    arguments,
                    *(str(folder / f"{rank}.{kind}") for kind in ("out", "err")),
                    {**os.environ, "RANK": str(rank), "LOCAL_RANK": str(rank), **shared},
                )
            )
            for rank in range(ranks)
        ]

    def ended(self, but: Container[int] = (), patience: float = PATIENCE) -> list[Ended]:
        """Waits for all ranks, but for those that hang on purpose and are killed."""
        begin = time.monotonic()
        seconds: dict[int, float] = {}
        awaited = [rank for rank in range(len(self.processes)) if rank not in but]
        while not seconds.keys() >= set(awaited) and time.monotonic() - begin < patience:
            for rank, process in enumerate(self.processes):
                if process.poll() is not None:
                    seconds.setdefault(rank, time.monotonic() - begin)
                if process.returncode:  # the others have some time to notice
                    patience = min(patience, seconds[rank] + AFTER_FAILURE)
            time.sleep(0.02)
        self.end()
        return [self._ended(rank, seconds.get(rank, math.inf)) for rank in range(len(self.processes))]

    def end(self) -> None:
        """Kills what is still there."""
        for process in self.processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        self._store = None

    def _ended(self, rank: int, seconds: float) -> Ended:
        output, errors = ((self.folder / f"{rank}.{kind}").read_text() for kind in ("out", "err"))
        results = [line.removeprefix("RESULT ") for line in output.splitlines() if line.startswith("RESULT ")]
        result = json.loads(results[-1]) if results else None
        code = self.processes[rank].returncode
        assert code is not None
        return Ended(code, result, output, errors, seconds)


@pytest.fixture
def start(nurseries: list[Nursery], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Job]]:
    """Starts a function of the test's module on several ranks; whatever still runs at the end of the test is killed."""
    jobs: list[Job] = []

    def started(
        ranks: int,
        body: Callable[..., Any],
        *,
        init: dict[str, Any] | None = None,
        environment: dict[str, str] | None = None,
        own_store: bool = False,
        **arguments: Any,
    ) -> Job:
        folder = tmp_path_factory.mktemp("job")
        jobs.append(Job(nurseries, folder, ranks, body, init or {}, environment or {}, arguments, own_store=own_store))
        return jobs[-1]

    yield started
    for job in jobs:
        job.end()


@pytest.fixture
def on_ranks(start: Callable[..., Job]) -> Callable[..., list[Any]]:
    """Runs a function of the test's module on several ranks, and gives what it has returned on each."""

    def run(ranks: int, body: Callable[..., Any], *, patience: float = PATIENCE, **options: Any) -> list[Any]:
        every = start(ranks, body, **options).ended(patience=patience)
        # Who had to be killed has only waited for who failed.
        for rank, ended in sorted(enumerate(every), key=lambda each: each[1].code == -signal.SIGKILL):
            assert ended.code == 0, f"rank {rank} ended with {ended.code}:\n{ended.output}\n{ended.errors}"
        return [ended.result for ended in every]

    return run
