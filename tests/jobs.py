"""Test bodies that run in several processes at once, as under torchrun but without its launcher."""

import functools
import inspect
import itertools
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

from tests.jobs_member import Member, serve
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
        self._store: TCPStore | None = None
        self._kept = socket.socket()  # its port: until the store of rank 0 listens there, nobody else is given it
        if own_store:
            self._kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._kept.bind(("127.0.0.1", 0))
            port = self._kept.getsockname()[1]
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

    @property
    def store(self) -> TCPStore:
        """That in the test's process."""
        assert self._store is not None
        return self._store

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
        self._kept.close()
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


class Crew:
    """Ranks that run one body after the other: most bodies take less time than the start of their ranks."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._numbers = itertools.count()

    @property
    def is_there(self) -> bool:
        return all(process.poll() is None for process in self._job.processes)

    def end(self) -> None:
        self._job.end()

    def run(self, body: Callable[..., Any], patience: float, arguments: dict[str, Any]) -> list[Any]:
        """What the body returns on each rank. All ranks end where it fails on one of them or has ended groups."""
        task = json.dumps([body.__code__.co_filename, body.__name__, arguments])
        number, store = next(self._numbers), self._job.store
        store.set(f"task {number}", task)
        ranks = range(len(self._job.processes))
        answers: dict[int, list[Any]] = {}
        deadline = time.monotonic() + patience
        while len(answers) < len(ranks) and time.monotonic() < deadline:
            for rank in ranks:
                if rank not in answers and store.check([f"answer {number} {rank}"]):
                    answers[rank] = json.loads(store.get(f"answer {number} {rank}"))
                    if answers[rank][1]:  # the others have some time to notice
                        deadline = min(deadline, time.monotonic() + AFTER_FAILURE)
            if not self.is_there:
                deadline = min(deadline, time.monotonic() + AFTER_FAILURE)
            time.sleep(0.005)
        if len(answers) < len(ranks) or any(error for _, error, _ in answers.values()):
            ended = self._job.ended(patience=1.0)
            # Who does not answer has only waited for who failed.
            # What was logged may say why: between calls, a failure of another rank breaks the groups of this one.
            told = [f"rank {rank}:\n{error}{ended[rank].errors[-1500:]}"
                    for rank, (_, error, _) in answers.items() if error]  # fmt: skip
            told += [f"rank {rank} ({ended[rank].code}) did not answer:\n{ended[rank].errors[-5000:]}"
                     for rank in ranks if rank not in answers]  # fmt: skip
            pytest.fail("\n".join(told), pytrace=False)
        if any(groups_ended for _, _, groups_ended in answers.values()):
            self.end()
        return [answers[rank][0] for rank in ranks]


@pytest.fixture(scope="session")
def crews() -> Iterator[dict[str, Crew]]:
    """Those that were started, by their numbers of ranks and the arguments of `pipework.init`."""
    started: dict[str, Crew] = {}
    yield started
    for crew in started.values():
        crew.end()


@pytest.fixture
def on_ranks(
    crews: dict[str, Crew],
    start: Callable[..., Job],
    nurseries: list[Nursery],
    tmp_path_factory: pytest.TempPathFactory,
) -> Callable[..., list[Any]]:
    """Runs a function of the test's module on several ranks, and gives what it has returned on each.

    The ranks may have run other functions before, unless they are to be `fresh`.
    """

    def run(
        ranks: int,
        body: Callable[..., Any],
        *,
        patience: float = PATIENCE,
        init: dict[str, Any] | None = None,
        fresh: bool = False,
        **arguments: Any,
    ) -> list[Any]:
        if fresh:
            return Crew(start(ranks, serve, init=init)).run(body, patience, arguments)
        key = json.dumps([ranks, init or {}])
        if key not in crews or not crews[key].is_there:
            crews[key] = Crew(Job(nurseries, tmp_path_factory.mktemp("crew"), ranks, serve, init or {}, {}, {}))
        return crews[key].run(body, patience, arguments)

    return run


def runs_on(ranks: int | None = None, *, patience: float = PATIENCE, fresh: bool = False, **init: Any) -> Any:
    """Makes a test of a function that several ranks run: what it returns has to be the same on all of them.

    Args:
        ranks: how many; None: as many as the test's parameter `ranks` says.
        patience: seconds.
        fresh: whether the ranks have run nothing before.
        init: arguments of `pipework.init`.

    The function gets the mesh. Of its other parameters, `folder` is the name of a new folder, `monkeypatch` is for
    changes that end with the test, and all others are parameters of the test.
    """

    def decorate(body: Callable[..., Any]) -> Callable[..., None]:
        names = [name for name in [*inspect.signature(body).parameters][1:] if name != "monkeypatch"]
        fixtures = {"on_ranks", *("tmp_path" if name == "folder" else name for name in names)}
        fixtures |= {"ranks"} if ranks is None else set()

        @functools.wraps(body)
        def test(on_ranks: Callable[..., list[Any]], **given: Any) -> None:
            count = given["ranks"] if ranks is None else ranks
            arguments = {name: str(given["tmp_path"]) if name == "folder" else given[name] for name in names}
            first, *others = on_ranks(count, body, patience=patience, fresh=fresh, init=init, **arguments)
            assert others == [first] * len(others), f"the ranks returned different values: {first}, {others}"

        keyword = inspect.Parameter.KEYWORD_ONLY
        test.__signature__ = inspect.Signature([inspect.Parameter(each, keyword) for each in sorted(fixtures)])  # type: ignore[attr-defined]
        return test

    return decorate
