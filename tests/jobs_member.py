"""One rank of a test: calls a function of a test module with the mesh that `pipework.init` gives it."""

import importlib.util
import json
import os
import signal
import sys
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import torch

import pipework
from tests import injection


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
    warnings.filterwarnings("ignore", "chunks is 1", pipework.PipeWarning)  # as pyproject.toml has it
    torch.set_num_threads(1)
    spec = importlib.util.spec_from_file_location(Path(member.path).stem, member.path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # classes are found by the name of their module
    spec.loader.exec_module(module)
    injection.install()
    mesh = pipework.init(**member.init)
    torch.manual_seed(0)
    result = getattr(module, member.function)(mesh, **member.arguments)
    print("\nRESULT " + json.dumps(result), flush=True)
