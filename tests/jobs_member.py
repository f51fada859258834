"""One rank of a test: calls a function of a test module with the mesh that `pipework.init` gives it."""

import gc
import importlib
import inspect
import itertools
import json
import os
import signal
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch.distributed import TCPStore

import pipework
from pipework import Mesh
from tests import injection

ROOT = Path(__file__).parents[1]


class Member(NamedTuple):
    """What a rank has to do.

    Attributes:
        path: of the test module.
        function: its name there.
        init: keywords of `pipework.init`.
        arguments: of the function, beside the mesh.
        output: the path of a file.
        errors: the path of another one.
        environment: all of it.
    """

    path: str
    function: str
    init: dict[str, Any]
    arguments: dict[str, Any]
    output: str
    errors: str
    environment: dict[str, str]


def enter(output: str, errors: str, environment: dict[str, str]) -> None:
    """Makes a forked process one of its own: a session, standard streams in files, another environment."""
    os.setsid()
    for number, path, flags in (
        (0, os.devnull, os.O_RDONLY),
        (1, output, os.O_WRONLY | os.O_CREAT),
        (2, errors, os.O_WRONLY | os.O_CREAT),
    ):
        file = os.open(path, flags, 0o600)
        os.dup2(file, number)
        os.close(file)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell has its background jobs ignore Ctrl-C
    os.environ.clear()
    os.environ.update(environment)


def run_member(member: Member) -> None:
    """What a process does that was forked for this, until it ends."""
    enter(member.output, member.errors, member.environment)
    warnings.simplefilter("error")
    for text in ("chunks is 1", "batch norm in training mode", "offload= moves nothing"):  # as pyproject.toml has it
        warnings.filterwarnings("ignore", text, pipework.PipeWarning)
    torch.set_num_threads(1)
    body = function_of(member.path, member.function)
    injection.install()
    mesh = pipework.init(**member.init)
    torch.manual_seed(0)
    result = body(mesh, **member.arguments)
    print("\nRESULT " + json.dumps(result), flush=True)


def function_of(path: str, name: str) -> Callable[..., Any]:
    """A function of a test module; one that `runs_on` has made a test of is the function below."""
    module = importlib.import_module(".".join(Path(path).relative_to(ROOT).with_suffix("").parts))
    return inspect.unwrap(getattr(module, name))


def serve(mesh: Mesh) -> None:
    """Runs the functions that the process of the tests names in the store, one after the other, until one fails.

    An answer says whether groups of layers were ended, as after a failure on a busy machine. The process has no use any
    more then: PyTorch gives DTensors over a new mesh the groups of an equal one that it has seen before.
    """
    address, port, rank = (os.environ[name] for name in ("MASTER_ADDR", "MASTER_PORT", "RANK"))
    store = TCPStore(address, int(port), None, False, timedelta(hours=5), wait_for_workers=False)
    ended: list[Mesh] = []
    ends = Mesh.break_layer_groups

    def note_end(mesh: Mesh) -> None:
        ended.append(mesh)
        ends(mesh)

    Mesh.break_layer_groups = note_end  # type: ignore[method-assign]
    for number in itertools.count():
        path, name, arguments = json.loads(store.get(f"task {number}"))
        result = error = None
        try:
            result = _run(function_of(path, name), mesh, arguments)
        except BaseException:
            error = traceback.format_exc()
        store.set(f"answer {number} {rank}", json.dumps([result, error, bool(ended)]))
        if error is not None:
            raise SystemExit(1)
        gc.collect()


def _run(body: Callable[..., Any], mesh: Mesh, arguments: dict[str, Any]) -> Any:
    torch.manual_seed(0)
    with warnings.catch_warnings(), torch.enable_grad(), pytest.MonkeyPatch.context() as patch:
        if "monkeypatch" in inspect.signature(body).parameters:
            arguments = {**arguments, "monkeypatch": patch}
        return body(mesh, **arguments)
