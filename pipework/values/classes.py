"""Classes by name, for messages between processes. Looking up a name imports nothing and runs nothing."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any


def name(kind: type) -> str:
    """A class as `module:qualified.name`.

    Raises:
        TypeError: the class cannot be found by that name, for example because it was defined in a function.

    Example:
        >>> from collections import OrderedDict
        >>> name(OrderedDict)
        'collections:OrderedDict'
    """
    full = f"{kind.__module__}:{kind.__qualname__}"
    if _find(full) is not kind:
        raise TypeError(
            f"the class {kind.__module__}.{kind.__qualname__}, which cannot be found by its name, as another process "
            "would have to (define it at the top of a module),"
        )
    return full


def named(full: Any) -> type:
    """The class of a name. Only modules that are imported already are searched.

    Raises:
        ValueError: this process does not know the class.

    Example:
        >>> named("collections:OrderedDict")
        <class 'collections.OrderedDict'>
    """
    found = _find(full) if isinstance(full, str) else None
    if found is None:
        raise ValueError(
            f"a class {full!r} arrives that this process does not know: import the module that defines it, in every "
            "process, before the first step"
        )
    return found


def _find(full: str) -> type | None:
    """Reads dictionaries only: reading an attribute of a module or a class may run code, or import a module."""
    module_name, _, path = full.partition(":")
    module = sys.modules.get(module_name)
    if not issubclass(type(module), ModuleType):
        return None
    inside = object.__getattribute__(module, "__dict__")
    found: Any = None
    for part in path.split("."):
        found = inside.get(part)
        if not issubclass(type(found), type):
            return None
        inside = type.__getattribute__(found, "__dict__")
    return found  # type: ignore[no-any-return]
