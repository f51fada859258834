"""What a loss function is, inside of partials and of what `torch.compile` returns."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple, Self

from pipework import torch_private


class InnerFunction(NamedTuple):
    """A function without what is around it.

    Attributes:
        function: the innermost one, or the module.
        keywords: that partials bind; an outer one's replace those of an inner one.
        binds_positions: whether partials bind positional arguments, too, so that others are passed to the function.

    Example:
        >>> from torch.nn import functional
        >>> inner = InnerFunction.of(functools.partial(functional.cross_entropy, ignore_index=0))
        >>> inner.function is functional.cross_entropy, inner.keywords, inner.binds_positions
        (True, {'ignore_index': 0}, False)
    """

    function: Any
    keywords: dict[str, Any]
    binds_positions: bool

    @classmethod
    def of(cls, function: Any) -> Self:
        """Of a function, a module or None."""
        keywords: dict[str, Any] = {}
        binds_positions = False
        while True:
            if isinstance(function, functools.partial):
                keywords = {**function.keywords, **keywords}
                binds_positions = binds_positions or bool(function.args)
                inside = function.func
            else:
                inside = torch_private.uncompiled(function)
            if inside is function:
                return cls(function, keywords, binds_positions)
            function = inside
