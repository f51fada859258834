"""Makes the adapters importable under the names of the old libraries."""

from __future__ import annotations

import importlib
import importlib.util
import pkgutil
import sys
import warnings
from importlib.abc import MetaPathFinder
from importlib.machinery import PathFinder
from typing import TYPE_CHECKING

from pipework.compat.modules import register

if TYPE_CHECKING:
    from collections.abc import Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType

OLD_NAMES = {
    "sync": "torch.distributed.pipeline.sync",
    "torchgpipe": "torchgpipe",
    "fairscale": "fairscale",
}
"""The names of the libraries in `install`, and the packages that old code imports."""


def install(*libraries: str) -> None:
    """Lets the import lines of old code import the adapters of `pipework.compat` from now on.

    Call it before the old modules are imported, best in the first lines of a script; it warns if torchgpipe has been
    imported before. The adapter replaces a library that is installed. Of an installed fairscale it replaces the
    modules of its `Pipe` alone.

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
        'pipework.compat.sync.pipe'
    """
    for library in [_known(library) for library in libraries] or OLD_NAMES:
        if library == "fairscale" and _is_installed("fairscale"):
            _replace_pipe_of_fairscale()
        else:
            _register_all(_modules(library))


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
    package = importlib.import_module(f"pipework.compat.{library}")
    for info in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
        importlib.import_module(info.name)
    old = OLD_NAMES[library]
    return {
        old + name.removeprefix(package.__name__): module
        for name, module in sorted(sys.modules.items())  # also those that `pipework.compat.modules` has made
        if f"{name}.".startswith(f"{package.__name__}.")
    }


def _register_all(modules: dict[str, ModuleType]) -> None:
    first, adapter = next(iter(modules.items()))
    if sys.modules.get(first, adapter) is not adapter and first.startswith("torchgpipe"):
        warnings.warn(
            f"{first} itself has been imported before: what was imported from it remains the old library's. Call "
            "install() before",
            stacklevel=3,
        )
    for name, module in modules.items():
        register(name, module)


def _is_installed(package: str) -> bool:
    """Whether a package is installed; its adapter, and a folder of that name, do not count."""
    loaded = sys.modules.get(package)
    spec = importlib.util.find_spec(package) if loaded is None else loaded.__spec__
    return spec is not None and spec.origin is not None and not spec.name.startswith("pipework.")


def _replace_pipe_of_fairscale() -> None:
    """Replaces the `Pipe` of an installed fairscale: now if it has been imported, else as soon as it is imported."""
    if "fairscale.nn" not in sys.modules:
        if not any(isinstance(finder, _ImportOfFairscale) for finder in sys.meta_path):
            sys.meta_path.insert(0, _ImportOfFairscale())
        return
    modules = {name: module for name, module in _modules("fairscale").items() if name.startswith("fairscale.nn.pipe")}
    sys.modules["fairscale.nn"].Pipe = modules["fairscale.nn.pipe"].Pipe  # type: ignore[attr-defined]
    _register_all(modules)


class _ImportOfFairscale(MetaPathFinder):
    """Replaces fairscale's `Pipe` when `fairscale.nn` is imported."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != "fairscale.nn":
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def execute_and_replace(module: ModuleType) -> None:
            execute(module)
            _replace_pipe_of_fairscale()

        spec.loader.exec_module = execute_and_replace  # type: ignore[method-assign]
        return spec
