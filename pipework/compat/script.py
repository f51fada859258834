"""Runs a script as the main module, with the adapters installed: in this process and in those that it spawns."""

from __future__ import annotations

import os
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import pipework
from pipework.compat.installing import install

_VARIABLE = "PIPEWORK_COMPAT_SCRIPT"  # of the environment, which spawned processes inherit


def run_as_main(script: Path, arguments: list[str]) -> None:
    """Runs a script like `python script.py ...`, with the adapters installed.

    A spawned process imports the main module of its parent by the name in its `__spec__`. Here that is the name of
    `pipework.compat.spawned`, which installs the adapters before it runs the script.

    Args:
        script: the file.
        arguments: the arguments of the script.
    """
    path = script.absolute()
    sys.argv = [str(script), *arguments]
    if not sys.flags.safe_path:  # in safe-path mode Python adds no folder
        sys.path[0] = str(path.resolve().parent)
    home = str(Path(pipework.__file__).resolve().parents[1])
    if home not in sys.path:  # spawned processes must find the package, too, if it was in the current folder
        sys.path.append(home)
    os.environ[_VARIABLE] = str(path)
    install()
    main = ModuleType("__main__")
    main.__file__ = str(path)
    main.__spec__ = ModuleSpec("pipework.compat.spawned", None, origin=str(path))
    sys.modules["__main__"] = main
    _execute(path, main.__dict__)


def run_as_spawned(namespace: dict[str, Any]) -> None:
    """Runs the script of the parent process in a spawned process, which needs its functions and classes.

    Args:
        namespace: of the module that becomes the main one.
    """
    path = Path(os.environ[_VARIABLE])
    install()
    namespace["__file__"] = str(path)
    _execute(path, namespace)


def _execute(path: Path, namespace: dict[str, Any]) -> None:
    # Bytes, since the first line may declare an encoding; the __future__ imports of this file are not inherited.
    exec(compile(path.read_bytes(), str(path), "exec", dont_inherit=True), namespace)
