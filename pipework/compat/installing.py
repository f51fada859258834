"""Makes the adapters importable under the names of the old libraries, and under their own."""

from __future__ import annotations

import importlib
import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import find_spec, module_from_spec
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

OLD_NAMES = {"sync": "torch.distributed.pipeline.sync", "torchgpipe": "torchgpipe", "fairscale": "fairscale"}
"""The names of the libraries in `install`, and the packages that old code imports."""

_COMMON = "batchnorm checkpoint skip skip.namespace skip.skippable"
_BALANCED = f"balance balance.blockpartition {_COMMON}"
SUBMODULES = {
    "pipework.compat.sync": f"_balance microbatch pipe utils {_COMMON}",
    "pipework.compat.torchgpipe": f"gpipe {_BALANCED}",
    "pipework.compat.fairscale.nn": " ".join(["pipe", "pipe.pipe", *(f"pipe.{each}" for each in _BALANCED.split())]),
}
"""The old submodules of each package, parents first. All are the package itself, which has the names of all."""


def install(*libraries: str) -> None:
    """Lets the import lines of old code import the adapters of `pipework.compat` from now on.

    Call it before the old modules are imported, best in the first lines of a script. The adapter replaces a library
    that is installed. Of an installed fairscale it replaces the modules of its `Pipe` alone.

    Args:
        libraries: "sync", "torchgpipe", "fairscale", or the name of an old module, such as
            "torch.distributed.pipeline.sync"; without arguments, all libraries.

    Raises:
        TypeError: a library is not a string.
        ValueError: there is no adapter for a library.

    Example:
        >>> install("sync")
        >>> from torch.distributed.pipeline.sync import Pipe
        >>> Pipe.__module__
        'pipework.compat.sync'
    """
    for library in [_known(library) for library in libraries] or OLD_NAMES:
        if library == "fairscale" and _is_installed("fairscale"):
            _replace_pipe_of_fairscale()
        else:
            for name, module in _modules(library).items():
                register(name, module)


def _known(library: str) -> str:
    """The key of a library in `OLD_NAMES`."""
    if not isinstance(library, str):
        raise TypeError(f'install takes names, such as install("sync", "torchgpipe"), got {library!r}')
    for known, old in OLD_NAMES.items():
        if library == known or f"{library}.".startswith(f"{old}."):
            return known
    raise ValueError(f"no adapter for {library!r}: there are {', '.join(map(repr, OLD_NAMES))}")


def _modules(library: str) -> dict[str, ModuleType]:
    """The adapter's modules by their old names, parents first."""
    package = f"pipework.compat.{library}"
    importlib.import_module(f"{package}.nn" if library == "fairscale" else package)
    return {
        OLD_NAMES[library] + name.removeprefix(package): module
        for name, module in sorted(sys.modules.items())
        if f"{name}.".startswith(f"{package}.")
    }


def _is_installed(package: str) -> bool:
    """Whether a package is installed; its adapter, and a folder of that name, do not count."""
    loaded = sys.modules.get(package)
    spec = find_spec(package) if loaded is None else loaded.__spec__
    return spec is not None and spec.origin is not None and not spec.name.startswith("pipework.")


def _replace_pipe_of_fairscale() -> None:
    """Replaces the `Pipe` of an installed fairscale: now if it has been imported, else as soon as it is imported."""
    if "fairscale.nn" not in sys.modules:
        if not any(isinstance(finder, _ImportOfFairscale) for finder in sys.meta_path):
            sys.meta_path.insert(0, _ImportOfFairscale())
        return
    for name, module in _modules("fairscale").items():
        if name.startswith("fairscale.nn.pipe"):
            register(name, module)
    vars(sys.modules["fairscale.nn"])["Pipe"] = vars(sys.modules["fairscale.nn.pipe"])["Pipe"]


class _ImportOfFairscale(MetaPathFinder):
    """Replaces fairscale's `Pipe` when `fairscale.nn` is imported."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        spec = PathFinder.find_spec(name, path, target) if name == "fairscale.nn" else None
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def execute_and_replace(module: ModuleType) -> None:
            execute(module)
            _replace_pipe_of_fairscale()

        spec.loader.exec_module = execute_and_replace  # type: ignore[method-assign]
        return spec


def add_submodules(package: str) -> None:
    """Makes the submodules of a package importable; the package calls this when it is imported.

    Python imports a package before its submodules, and then finds them in `sys.modules`.

    Args:
        package: a key of `SUBMODULES`.

    Example:
        >>> import pipework.compat.sync.skip.namespace
        >>> pipework.compat.sync.skip.namespace.Namespace
        <class 'pipework.skip.decorator.Namespace'>
    """
    module = sys.modules[package]
    vars(module).setdefault("__path__", [])  # what makes it a package
    for name in SUBMODULES[package].split():
        register(f"{package}.{name}", module)


def register(name: str, module: ModuleType) -> None:
    """Makes a module importable under a name, and creates the packages above it that do not exist."""
    parent, _, child = name.rpartition(".")
    if parent:
        if parent not in sys.modules:
            try:
                importlib.import_module(parent)
            except ModuleNotFoundError:
                register(parent, module_from_spec(ModuleSpec(parent, None, is_package=True)))
        # A function of the package may have the name of a submodule, as `skip.skippable` does: the function stays.
        if isinstance(vars(sys.modules[parent]).get(child, module), ModuleType):
            setattr(sys.modules[parent], child, module)
    sys.modules[name] = module
