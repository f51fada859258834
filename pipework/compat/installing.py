"""Puts the adapters where old code imports them from."""

from __future__ import annotations

import importlib
import importlib.util
import pkgutil
import sys
import warnings
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import ModuleType

OLD_NAMES = {
    "sync": "torch.distributed.pipeline.sync",
    "torchgpipe": "torchgpipe",
    "fairscale": "fairscale",
}
"""What the libraries are called in `install`, and what old code imports."""


def install(*libraries: str) -> None:
    """From now on, old import lines give the adapters of `pipework.compat`.

    To be called before the old modules are imported, best in the first lines of a script; a warning says if it is too
    late. A library that is really there, such as torchgpipe itself, is no longer found; of fairscale only what has to
    do with its `Pipe` is replaced.

    Args:
        libraries: some of "sync", "torchgpipe" and "fairscale", or what the import lines say, such as
            "torch.distributed.pipeline.sync"; none given means all.

    Raises:
        TypeError: a library is no text.
        ValueError: there is no adapter for a library.

    Example:
        >>> install("sync")
        >>> from torch.distributed.pipeline.sync import Pipe
        >>> Pipe.__module__
        'pipework.compat.sync.pipe'
    """
    for library in [_known(library) for library in libraries] or OLD_NAMES:
        if library == "fairscale" and _is_there("fairscale"):
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
    names = [package.__name__, *(info.name for info in pkgutil.walk_packages(package.__path__, f"{package.__name__}."))]
    old = OLD_NAMES[library]
    return {old + name.removeprefix(package.__name__): importlib.import_module(name) for name in names}


def _register_all(modules: dict[str, ModuleType]) -> None:
    first, adapter = next(iter(modules.items()))
    if sys.modules.get(first, adapter) is not adapter and first.startswith("torchgpipe"):
        warnings.warn(
            f"{first} itself has been imported before: what was imported from it remains the old library's. Call "
            "install() before",
            stacklevel=3,
        )
    for name, module in modules.items():
        _register(name, module)


def _register(name: str, module: ModuleType) -> None:
    """Makes a module importable under a name, with packages above it where there are none."""
    parent, _, child = name.rpartition(".")
    if parent:
        if parent not in sys.modules:
            try:
                importlib.import_module(parent)
            except ModuleNotFoundError:
                _register(parent, importlib.util.module_from_spec(ModuleSpec(parent, None, is_package=True)))
        # A package may have a function of the same name, which is what people mean.
        if _is_module(getattr(sys.modules[parent], child, module)):
            setattr(sys.modules[parent], child, module)
    sys.modules[name] = module


def _is_module(value: Any) -> bool:
    return isinstance(value, type(sys))


def _is_there(package: str) -> bool:
    """Whether a package itself can be imported, and not only its adapter or a folder of that name."""
    loaded = sys.modules.get(package)
    spec = importlib.util.find_spec(package) if loaded is None else loaded.__spec__
    return spec is not None and spec.origin is not None and not spec.name.startswith("pipework.")


def _replace_pipe_of_fairscale() -> None:
    """Replaces the `Pipe` of fairscale that is really there, now or, since importing it takes long, with its import."""
    if "fairscale.nn" not in sys.modules:
        if not any(isinstance(finder, _ImportOfFairscale) for finder in sys.meta_path):
            sys.meta_path.insert(0, _ImportOfFairscale())
        return
    modules = {name: module for name, module in _modules("fairscale").items() if name.startswith("fairscale.nn.pipe")}
    sys.modules["fairscale.nn"].Pipe = modules["fairscale.nn.pipe"].Pipe  # type: ignore[attr-defined]
    _register_all(modules)


class _ImportOfFairscale(MetaPathFinder):
    """Waits for the import of `fairscale.nn`."""

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
