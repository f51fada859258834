"""The signatures of functions, whatever their annotations say."""

from __future__ import annotations

import inspect
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

if sys.version_info >= (3, 14):
    import annotationlib

    def signature_of(function: Callable[..., Any]) -> inspect.Signature:
        """`inspect.signature`, also where annotations name what is there for type checkers only.

        Since Python 3.14 they may, as they are computed when somebody asks for them; `inspect.signature` does.
        """
        return inspect.signature(function, annotation_format=annotationlib.Format.FORWARDREF)

else:

    def signature_of(function: Callable[..., Any]) -> inspect.Signature:
        """`inspect.signature`."""
        return inspect.signature(function)
