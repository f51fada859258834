"""Runs torchgpipe and fairscale themselves, in a process of their own, and returns what they compute.

A *scenario* is a function of a test file. It is called with a `Library` and further arguments, and returns a value that
can be pickled. The test calls the same function with the adapter instead of the library, and compares the two values.
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import importlib.metadata
import importlib.util
import os
import pickle
import subprocess
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

VERSIONS = {"torchgpipe": "0.0.7", "fairscale": "0.4.13"}
ROOT = Path(__file__).parents[2]
PATIENCE = 60  # seconds for an answer


@dataclass(frozen=True)
class Library:
    """One of the two, or its adapter.

    Attributes:
        name: "torchgpipe" or "fairscale".
        adapted: whether it is the adapter.
    """

    name: str
    adapted: bool = False

    @property
    def package(self) -> str:
        """The package with the pipe in it."""
        package = {"torchgpipe": "torchgpipe", "fairscale": "fairscale.nn.pipe"}[self.name]
        return f"pipework.compat.{package}" if self.adapted else package

    def module(self, name: str = "") -> ModuleType:
        """The package, or a module in it."""
        return importlib.import_module(f"{self.package}.{name}" if name else self.package)

    @property
    def Pipe(self) -> type[Any]:
        """The pipe's class."""
        return getattr(self.module(), {"torchgpipe": "GPipe", "fairscale": "Pipe"}[self.name])

    def pipe(
        self, module: nn.Module, balance: Sequence[int], chunks: int = 1, checkpoint: str = "never", **options: Any
    ) -> Any:
        """A pipe on the CPU."""
        devices = ["cpu"] * len(balance)
        return self.Pipe(module, balance, devices=devices, chunks=chunks, checkpoint=checkpoint, **options)


class Say(nn.Module):
    """Calls a function with its inputs."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *inputs: Any) -> Any:
        return self.function(*inputs)


def layers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 2))


def outcome(function: Callable[[], Any]) -> Any:
    """What a function returns, or which error it raises."""
    try:
        return function()
    except Exception as error:
        return ("raises", type(error).__name__, str(error))


def answer(scenario: Callable[..., Any], library: Library, *arguments: Any) -> Any:
    """What a scenario returns, or which error it raises."""
    torch.manual_seed(0)
    return outcome(lambda: scenario(library, *arguments))


class Originals:
    """The process in which the libraries are. It ends by itself when the tests have ended."""

    def __init__(self) -> None:
        self._connection, theirs = Pipe()
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        command = [sys.executable, __file__, str(theirs.fileno())]
        self._process = subprocess.Popen(command, env=environment, pass_fds=[theirs.fileno()])
        theirs.close()

    def answer(self, scenario: Callable[..., Any], name: str, *arguments: Any) -> Any:
        """What a scenario returns with a library."""
        self._connection.send_bytes(pickle.dumps((scenario.__code__.co_filename, scenario.__name__, name, arguments)))
        assert self._connection.poll(2 * PATIENCE), "the process with the original libraries gives no answer"
        return pickle.loads(self._connection.recv_bytes())

    def close(self) -> None:
        """Ends the process, in whatever state it is."""
        self._connection.close()
        self._process.kill()
        self._process.wait()


def installed(name: str) -> bool:
    """Whether the very version of a library is there that the tests are written for."""
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(name) == VERSIONS[name]
    return False


def loaded(path: str, files: dict[str, ModuleType]) -> ModuleType:
    """A test file as a module."""
    if path not in files:
        spec = importlib.util.spec_from_file_location(f"scenarios_{len(files)}", path)
        assert spec is not None
        assert spec.loader is not None
        files[path] = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = files[path]  # so that classes defined there can be pickled
        spec.loader.exec_module(files[path])
    return files[path]


def serve(connection: Connection) -> None:
    """Answers questions until nobody asks any more."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    files: dict[str, ModuleType] = {}
    while True:
        path, function, name, arguments = pickle.loads(connection.recv_bytes())
        faulthandler.dump_traceback_later(PATIENCE, exit=True)
        reply = answer(getattr(loaded(path, files), function), Library(name), *arguments)
        faulthandler.cancel_dump_traceback_later()
        connection.send_bytes(pickle.dumps(reply))


if __name__ == "__main__":
    try:
        serve(Connection(int(sys.argv[1])))
    finally:
        os._exit(0)  # without a look at the pipes that are left
