"""The signatures of functions, whatever their annotations say."""

from __future__ import annotations

import inspect
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn

_OPTIONS: dict[str, Any] = {}
if sys.version_info >= (3, 14):
    import annotationlib

    _OPTIONS["annotation_format"] = annotationlib.Format.FORWARDREF


def signature_of(function: Callable[..., Any]) -> inspect.Signature:
    """`inspect.signature`, also where annotations name what is there for type checkers only.

    Since Python 3.14 they may, as they are computed when somebody asks for them; `inspect.signature` does.
    """
    return inspect.signature(function, **_OPTIONS)


def positional_names(module: nn.Module) -> tuple[str, ...]:
    """The names of the positional arguments of a module's forward; none if they cannot be told.

    Example:
        >>> from torch import nn
        >>> positional_names(nn.Linear(1, 1)), positional_names(nn.Bilinear(1, 1, 1))
        (('input',), ('input1', 'input2'))
    """
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    try:
        parameters = signature_of(module.forward).parameters.values()
    except (TypeError, ValueError):  # of a function in C, or an object of the user's
        return ()
    return tuple([each.name for each in parameters if each.kind in kinds])
