"""Fixtures that run Python programs without importing PyTorch each time; see tests/program.py."""

import contextlib
import os
import signal
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from benchmarks.two_processes import address_of, hosted_store
from tests.nursery import ENVIRONMENT, Nursery, RankProcess
from tests.program import Program

RunPython = Callable[..., subprocess.CompletedProcess[str]]


class Running:
    """A program, as `subprocess.Popen` would have it.

    Attributes:
        process: in a session of its own.
    """

    def __init__(
        self, nursery: Nursery, folder: Path, arguments: Sequence[object], cwd: object, env: Mapping[str, str]
    ) -> None:
        self.arguments = [str(each) for each in arguments]
        self._output, self._errors = folder / "output", folder / "errors"
        program = Program(self.arguments, str(cwd), str(self._output), str(self._errors), dict(env))
        nursery.open()
        self.process: RankProcess = nursery.start(program)

    @property
    def output(self) -> str:
        """What it has written so far."""
        return self._output.read_text() if self._output.exists() else ""

    @property
    def errors(self) -> str:
        """What it has written to its standard error so far, but for what Triton says of the process that was forked."""
        return self._errors.read_text().partition("nanobind: leaked")[0] if self._errors.exists() else ""

    def ended(self, timeout: float) -> subprocess.CompletedProcess[str]:
        """Waits for its end."""
        code = self.process.wait(timeout)
        if code is None:
            raise subprocess.TimeoutExpired(self.arguments, timeout, self.output, self.errors)
        return subprocess.CompletedProcess(self.arguments, code, self.output, self.errors)

    def end(self) -> None:
        """Kills what is still there of it."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


@pytest.fixture
def start_python(
    nurseries: list[Nursery], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[..., Running]]:
    """Starts a program: its arguments, the working directory and the environment."""
    started: list[Running] = []

    def start(
        arguments: Sequence[object], *, cwd: object | None = None, env: Mapping[str, str] | None = None
    ) -> Running:
        folder = tmp_path_factory.mktemp("program")
        started.append(
            Running(nurseries[0], folder, arguments, cwd or os.getcwd(), env or {**os.environ, **ENVIRONMENT})
        )
        return started[-1]

    yield start
    for each in started:
        each.end()


@pytest.fixture
def run_python(start_python: Callable[..., Running]) -> RunPython:
    """Runs a program to its end, and gives what `subprocess.run` would: its status, its output and its errors."""

    def run(arguments: Sequence[object], *, timeout: float = 100.0, **options: Any) -> subprocess.CompletedProcess[str]:
        return start_python(arguments, **options).ended(timeout)

    return run


@pytest.fixture
def run_ranks(start_python: Callable[..., Running]) -> RunPython:
    """Runs a program on several ranks, as torchrun would start them; its output is that of one after the other."""

    def run(ranks: int, arguments: Sequence[object], *, timeout: float = 100.0) -> subprocess.CompletedProcess[str]:
        store = hosted_store()
        shared = {**os.environ, **ENVIRONMENT, **address_of(store)}
        shared |= {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
        programs = [
            start_python(arguments, env={**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}) for rank in range(ranks)
        ]
        ended = [program.ended(timeout) for program in programs]
        code = next((each.returncode for each in ended if each.returncode), 0)
        output, errors = ("".join(getattr(each, name) for each in ended) for name in ("stdout", "stderr"))
        return subprocess.CompletedProcess([str(each) for each in arguments], code, output, errors)

    return run
