"""Makes the adapters importable under the names of the old libraries, and under their own."""

from __future__ import annotations

import importlib
import sys
from importlib.machinery import ModuleSpec
from importlib.util import find_spec, module_from_spec
from types import ModuleType

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
        libraries: "sync", "torchgpipe", "fairscale"; without arguments, all of them.

    Raises:
        ValueError: there is no adapter for a library.

    Example:
        >>> install("sync")
        >>> from torch.distributed.pipeline.sync import Pipe
        >>> Pipe.__module__
        'pipework.compat.sync'
    """
    for library in libraries:
        if library not in tuple(OLD_NAMES):  # which a list may be asked of, too
            raise ValueError(f"no adapter for {library!r}: there are {', '.join(map(repr, OLD_NAMES))}")
    for library in libraries or OLD_NAMES:
        package = f"pipework.compat.{library}"
        importlib.import_module(f"{package}.nn" if library == "fairscale" else package)
        original = _fairscale_nn() if library == "fairscale" else None
        for name, module in sorted(sys.modules.items()):  # parents come first
            old = OLD_NAMES[library] + name.removeprefix(package)
            if f"{name}.".startswith(f"{package}.") and (original is None or old.startswith("fairscale.nn.pipe")):
                register(old, module)
        if original is not None:
            vars(original)["Pipe"] = vars(sys.modules["fairscale.nn.pipe"])["Pipe"]


def _fairscale_nn() -> ModuleType | None:
    """The package of an installed fairscale that has its `Pipe`; the adapter, and a folder of that name, do not count.

    It is imported, since what it has beside `Pipe` is its own, such as `FullyShardedDataParallel`.
    """
    spec = find_spec("fairscale")
    is_installed = spec is not None and spec.origin is not None and spec.name == "fairscale"
    return importlib.import_module("fairscale.nn") if is_installed else None


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
