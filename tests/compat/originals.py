"""Runs torchgpipe and fairscale themselves, in a process of their own, and returns what they compute.

Both wait forever when a layer raises SystemExit, and fairscale also when Python exits. The tests then kill that
process; if the tests have ended, it ends by itself.

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


HANGS = "waits for ever"


def answer(scenario: Callable[..., Any], library: Library, *arguments: Any) -> Any:
    """What a scenario returns, or which exception it raises."""
    torch.manual_seed(0)
    try:
        return scenario(library, *arguments)
    except Exception as error:
        return ("raises", type(error).__name__, str(error))


class Originals:
    """The process in which the libraries are."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    def answer(self, scenario: Callable[..., Any], name: str, *arguments: Any, patience: float = 60) -> Any:
        """What a scenario returns with a library.

        Args:
            scenario: see above.
            name: of the library.
            arguments: of the scenario.
            patience: for how many seconds to wait. `HANGS` is the answer if that was not enough.
        """
        if self._process is None:
            self._start()
        question = (scenario.__code__.co_filename, scenario.__name__, name, arguments, patience)
        self._connection.send_bytes(pickle.dumps(question))
        if not self._connection.poll(patience):
            self.close()
            return HANGS
        try:
            return pickle.loads(self._connection.recv_bytes())
        except EOFError:  # it crashed; the next question starts another
            self.close()
            raise

    def _start(self) -> None:
        self._connection, theirs = Pipe()
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        command = [sys.executable, __file__, str(theirs.fileno())]
        self._process = subprocess.Popen(command, env=environment, pass_fds=[theirs.fileno()])
        theirs.close()
        assert self._connection.poll(100), "the process with the original libraries does not start"
        assert pickle.loads(self._connection.recv_bytes()) == "ready"

    def close(self) -> None:
        """Ends the process, in whatever state it is."""
        if self._process is not None:
            self._connection.close()
            self._process.kill()
            self._process.wait()
            self._process = None


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
    connection.send_bytes(pickle.dumps("ready"))
    while True:
        path, function, name, arguments, patience = pickle.loads(connection.recv_bytes())
        faulthandler.dump_traceback_later(2 * patience, exit=True)
        reply = answer(getattr(loaded(path, files), function), Library(name), *arguments)
        faulthandler.cancel_dump_traceback_later()
        connection.send_bytes(pickle.dumps(reply))


if __name__ == "__main__":
    try:
        serve(Connection(int(sys.argv[1])))
    finally:
        os._exit(0)  # without a look at the pipes that are left
