"""The submodules of the adapters that only re-export names: one table instead of one file each.

The packages of the adapters, and the modules with code in them, are files. A type checker sees those alone: annotate
code with the names of `pipework` itself, or with those of `pipework.compat.sync`, `.torchgpipe` and `.fairscale.nn`.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from importlib.machinery import ModuleSpec
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from types import ModuleType

Sources = dict[str, tuple[str, ...]]  # for each module that defines names, these names

_PHASES: Sources = {"pipework.model.checkpoint": ("is_checkpointing", "is_recomputing")}
_COMMON: dict[str, Sources] = {
    "batchnorm": {"pipework.model.batchnorm": ("DeferredBatchNorm",)},
    "skip": {
        "pipework.skip": ("Namespace", "pop", "skippable", "stash"),
        "pipework.compat.skippables": ("verify_skippables",),
    },
    "skip.namespace": {"pipework.skip": ("Namespace",)},
    "skip.skippable": {
        "pipework.skip": ("Skippable", "pop", "skippable", "stash"),
        "pipework.compat.skippables": ("verify_skippables",),
    },
}
_BALANCE: dict[str, Sources] = {
    "balance": {"pipework.compat.balances": ("balance_by_size", "balance_by_time")},
    "balance.blockpartition": {"pipework.compat.balances": ("solve",)},
}
REEXPORTS: dict[str, dict[str, Sources]] = {
    "pipework.compat.sync": _COMMON
    | {
        "checkpoint": _PHASES | {"pipework.compat.checkpoints": ("checkpoint",)},
        "microbatch": {"pipework.compat.sync.no_chunk": ("NoChunk",)},
    },
    "pipework.compat.torchgpipe": _COMMON | _BALANCE,
    "pipework.compat.fairscale.nn.pipe": _COMMON | _BALANCE | {"checkpoint": _PHASES},
}
"""For each package of an adapter its submodules without a file, parents first."""


def add_submodules(package: str) -> None:
    """Makes the submodules of a package that have no file importable.

    The package calls this when it is imported. Python imports a package before its submodules, and then finds them in
    `sys.modules`.

    Args:
        package: a key of `REEXPORTS`.

    Example:
        >>> import pipework.compat.sync.skip.namespace
        >>> pipework.compat.sync.skip.namespace.Namespace
        <class 'pipework.skip.namespace.Namespace'>
    """
    submodules = REEXPORTS[package]
    for submodule, sources in submodules.items():
        is_package = any(other.startswith(f"{submodule}.") for other in submodules)
        module = empty_module(f"{package}.{submodule}", is_package)
        names = {name: getattr(importlib.import_module(source), name) for source in sources for name in sources[source]}
        vars(module).update(names, __all__=sorted(names))
        register(module.__name__, module)


def empty_module(name: str, is_package: bool) -> ModuleType:
    """A module that no file defines."""
    return importlib.util.module_from_spec(ModuleSpec(name, None, is_package=is_package))


def register(name: str, module: ModuleType) -> None:
    """Makes a module importable under a name, and creates the packages above it that do not exist."""
    parent, _, child = name.rpartition(".")
    if parent:
        if parent not in sys.modules:
            try:
                importlib.import_module(parent)
            except ModuleNotFoundError:
                register(parent, empty_module(parent, is_package=True))
        # A function of the package may have the name of a submodule, as `skip.skippable` does: the function stays.
        if _is_module(getattr(sys.modules[parent], child, module)):
            setattr(sys.modules[parent], child, module)
    sys.modules[name] = module


def _is_module(value: Any) -> bool:
    return isinstance(value, type(sys))
