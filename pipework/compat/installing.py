"""Puts the adapters where old code imports them from."""

from __future__ import annotations

import importlib
import importlib.util
import pkgutil
import sys
from types import ModuleType

OLD_NAMES = {
    "sync": "torch.distributed.pipeline.sync",
    "torchgpipe": "torchgpipe",
    "fairscale": "fairscale",
}
"""What the libraries are called in `install`, and what old code imports."""


def install(*libraries: str) -> None:
    """From now on, old import lines give the adapters of `pipework.compat`.

    To be called before the old modules are imported, best in the first lines of a script. A library that is really
    there, such as torchgpipe itself, is no longer found; of fairscale only what has to do with its `Pipe` is replaced.

    Args:
        libraries: some of "sync" (for `torch.distributed.pipeline.sync`), "torchgpipe" and "fairscale"; none given
            means all.

    Raises:
        ValueError: there is no adapter for a library.

    Example:
        >>> install("sync")
        >>> from torch.distributed.pipeline.sync import Pipe
        >>> Pipe.__module__
        'pipework.compat.sync.pipe'
    """
    unknown = [library for library in libraries if library not in OLD_NAMES]
    if unknown:
        raise ValueError(f"no adapter for {unknown[0]!r}: there are {', '.join(map(repr, OLD_NAMES))}")
    for library in libraries or OLD_NAMES:
        for name, module in _modules(library).items():
            _register(name, module)


def _modules(library: str) -> dict[str, ModuleType]:
    """The adapter's modules by their old names, parents first."""
    package = importlib.import_module(f"pipework.compat.{library}")
    names = [package.__name__, *(info.name for info in pkgutil.walk_packages(package.__path__, f"{package.__name__}."))]
    old = OLD_NAMES[library]
    modules = {old + name.removeprefix(package.__name__): importlib.import_module(name) for name in names}
    if library == "fairscale" and _real_fairscale():
        inside = {name: module for name, module in modules.items() if name.startswith("fairscale.nn.pipe")}
        sys.modules["fairscale.nn"].Pipe = inside["fairscale.nn.pipe"].Pipe  # type: ignore[attr-defined]
        return inside
    return modules


def _real_fairscale() -> bool:
    """Whether fairscale is there; then it is imported."""
    loaded = sys.modules.get("fairscale")
    if loaded is not None:
        return not loaded.__name__.startswith("pipework.")
    if importlib.util.find_spec("fairscale") is None:
        return False
    importlib.import_module("fairscale.nn")
    return True


def _register(name: str, module: ModuleType) -> None:
    """Makes a module importable under a name, with packages above it where there are none."""
    parent, _, child = name.rpartition(".")
    if parent:
        if parent not in sys.modules:
            try:
                importlib.import_module(parent)
            except ModuleNotFoundError:
                package = ModuleType(parent)
                package.__path__ = []
                _register(parent, package)
        # A package may have a function of the same name, which is what people mean.
        if isinstance(getattr(sys.modules[parent], child, module), ModuleType):
            setattr(sys.modules[parent], child, module)
    sys.modules[name] = module
