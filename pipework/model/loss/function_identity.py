"""What can be told of a function in a way that is the same in all processes that were given the same one."""

from __future__ import annotations

import contextlib
import functools
import hashlib
from types import CodeType
from typing import TYPE_CHECKING, Any

from torch import nn

from pipework import torch_private
from pipework.signatures import signature_of

if TYPE_CHECKING:
    from collections.abc import Mapping


def function_identity(function: Any) -> list[Any] | None:
    """The name of a function, a digest of its code, and its settings, as JSON values.

    Of PyTorch's own functions and modules all plain settings count. Of others only floats that are arguments do: an
    integer or a text may be the number of a process or its device, another attribute may be a time, and a closure may
    hold any of them; these differ rightly.

    Args:
        function: a function, a `functools.partial`, or an object that can be called; None gives None.

    Example:
        >>> function_identity(nn.CrossEntropyLoss(label_smoothing=0.1))[1]["label_smoothing"]
        0.1
        >>> function_identity(lambda output, target: (output - target).abs().sum())[0]
        '<lambda>'
    """
    if function is None:
        return None
    function = _unwrapped(function)
    if isinstance(function, functools.partial):
        inner = function_identity(function.func)
        given = {**{str(n): value for n, value in enumerate(function.args)}, **function.keywords}
        return ["partial", inner, _plain(given, all_kinds=_is_of_torch(function.func))]
    name = getattr(function, "__qualname__", None)
    code = getattr(function, "__code__", None)
    if isinstance(name, str):  # a function, also one in C, or a method
        return [name] if code is None or _is_of_torch(function) else [name, _digest(code)]
    kind = type(function)
    attributes = {name: value for name, value in getattr(function, "__dict__", {}).items() if name != "training"}
    if _is_of_torch(kind):
        return [kind.__qualname__, _plain(attributes, all_kinds=True)]
    with contextlib.suppress(ValueError, TypeError):  # a class in C may have no signature
        arguments = signature_of(kind).parameters
        attributes = {name: value for name, value in attributes.items() if name in arguments}
    code = getattr(kind.forward if isinstance(function, nn.Module) else kind.__call__, "__code__", None)
    return [kind.__qualname__, _plain(attributes, all_kinds=False), *([] if code is None else [_digest(code)])]


def _unwrapped(function: Any) -> Any:
    """What `torch.compile` and `functools.wraps` are around: their wrappers have the same code for all functions."""
    seen = set()
    while id(function) not in seen:
        seen.add(id(function))
        inside = torch_private.uncompiled(function)
        function = inside if _is_of_torch(inside) else getattr(inside, "__wrapped__", inside)
    return function


def _is_of_torch(function: Any) -> bool:
    return str(getattr(function, "__module__", "")).partition(".")[0] == "torch"


def _plain(settings: Mapping[str, Any], *, all_kinds: bool) -> dict[str, Any]:
    kinds = (bool, int, float, str) if all_kinds else (float,)
    return {name: value for name, value in settings.items() if type(value) in kinds and not name.startswith("_")}


def _digest(code: CodeType) -> str:
    """Of what a function computes: instructions, names and plain constants; not of where it stands."""
    parts = [code.co_code.hex(), *code.co_names, *code.co_varnames, *code.co_freevars]
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            parts.append(_digest(constant))
        elif isinstance(constant, bool | int | float | complex | str | bytes | None):
            parts.append(repr(constant))
    return f"code {hashlib.sha256(chr(0).join(parts).encode()).hexdigest()[:16]}"
