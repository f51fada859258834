"""A Python program in a forked process that has imported PyTorch already, which takes seconds; see tests/nursery.py.

It runs as `python ...` would run it, but what happens when PyTorch, pipework or the interpreter are loaded is over:
their warnings, and what they read of the environment.
"""

import os
import runpy
import sys
import types
import warnings
from pathlib import Path
from typing import NamedTuple

from tests.jobs_member import enter


class Program(NamedTuple):
    """A program to run.

    Attributes:
        arguments: what follows `python` on the command line: `-c` and code, `-m` and a module, or a script.
        folder: the working directory.
        output: the path of a file.
        errors: the path of another one.
        environment: all of it.
    """

    arguments: list[str]
    folder: str
    output: str
    errors: str
    environment: dict[str, str]


def run_program(program: Program) -> None:
    """What a process does that was forked for this, until it ends."""
    enter(program.output, program.errors, program.environment)
    os.chdir(program.folder)
    for action in filter(None, os.environ.get("PYTHONWARNINGS", "").split(",")):
        warnings._setoption(action)  # type: ignore[attr-defined]
    del sys.path[0]  # that of nursery.py
    sys.path[:0] = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    try:
        _run(*program.arguments)
    except Exception as error:
        # As the interpreter ends, and as a traceback looks that begins in the program.
        traceback = error.__traceback__
        while traceback is not None and traceback.tb_frame.f_code.co_filename in (__file__, "<frozen runpy>"):
            traceback = traceback.tb_next
        error.__traceback__ = traceback
        sys.last_type, sys.last_value, sys.last_traceback = type(error), error, traceback
        sys.excepthook(type(error), error, traceback)
        sys.exit(1)


def _run(what: str, *arguments: str) -> None:
    main = types.ModuleType("__main__")
    sys.modules["__main__"] = main
    sys.argv[:] = [what, *arguments]
    if what == "-m":
        sys.argv[:] = [what, *arguments[1:]]
        sys.path.insert(0, os.getcwd())
        runpy._run_module_as_main(arguments[0])  # type: ignore[attr-defined]
    elif what == "-c":
        sys.argv[:] = [what, *arguments[1:]]
        sys.path.insert(0, "")
        exec(compile(arguments[0], "<string>", "exec"), main.__dict__)
    else:
        sys.path.insert(0, str(Path(what).resolve().parent))
        main.__file__ = what
        exec(compile(Path(what).read_bytes(), what, "exec"), main.__dict__)
