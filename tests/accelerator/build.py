"""Builds the simulated accelerator, once for each state of its sources, of PyTorch and of the compiler.

`python -m tests.accelerator.build` only builds it.
"""

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from types import ModuleType
from unittest import mock

import torch
from torch.utils import cpp_extension

SOURCES = Path(__file__).parent / "device"
BUILDS = Path(__file__).parents[2] / "build" / "accelerator"
# Optimizing more costs more time in building than it saves in the tests.
FLAGS = ["-std=c++20", "-O1", "-Wall"]


def build() -> ModuleType:
    """The extension, compiled if need be.

    Raises:
        RuntimeError: if there is no compiler, no ninja, or no header files of Python. The message says which.
    """
    # A virtual environment that is not activated has its ninja beside its Python.
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    with mock.patch.dict(os.environ, PATH=path):
        return _build()


def _build() -> ModuleType:
    compiler = _compiler()
    files = sorted(path for path in SOURCES.iterdir() if path.suffix in (".cpp", ".h"))
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True).stdout
    state = hashlib.sha256(f"{torch.__version__} {torch.version.git_version} {version} {FLAGS}".encode())
    # Ninja itself compiles again what has changed in the sources.
    folder = BUILDS / state.hexdigest()[:12]
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "building").open("w") as building:
        fcntl.flock(building, fcntl.LOCK_EX)
        # PyTorch's own lock: nobody else builds now, so one that is there is of a build that was killed.
        (folder / "lock").unlink(missing_ok=True)
        return cpp_extension.load(
            "simulated_accelerator",
            [str(path) for path in files if path.suffix == ".cpp"],
            extra_cflags=FLAGS,
            build_directory=str(folder),
        )


def _compiler() -> str:
    """The C++ compiler; what else is needed is looked for, too."""
    compiler = cpp_extension.get_cxx_compiler()
    if shutil.which(compiler) is None:
        raise RuntimeError(
            f"the simulated accelerator needs a C++ compiler, and there is no {compiler!r}: install gcc or clang, "
            "or set CXX to the name of one"
        )
    if not cpp_extension.is_ninja_available():
        raise RuntimeError("the simulated accelerator is built with ninja, which was not found: pip install ninja")
    header = Path(sysconfig.get_path("include"), "Python.h")
    if not header.exists():
        raise RuntimeError(
            f"the simulated accelerator needs Python's header files, and there is no {header}: install them "
            "(python3-dev on Debian)"
        )
    return compiler


if __name__ == "__main__":
    try:
        build()
    except RuntimeError as error:
        sys.exit(str(error))
