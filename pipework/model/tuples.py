"""The rule for a tuple between two layers: it becomes the positional arguments of the next layer, or one argument."""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING, Any

from pipework import torch_private
from pipework.signatures import signature_of

if TYPE_CHECKING:
    from torch import nn


class TupleRule(Enum):
    """The rules for a tuple between two layers."""

    BY_SIGNATURE = "by signature"
    """Whole if the layer's forward can take no more than one argument, as in `nn.Sequential`; else spread."""
    SPREAD = "spread"
    """Always spread, as in `PipeSequential`."""
    WHOLE = "whole"
    """Always whole."""

    def keeps_whole(self, layer: nn.Module, others: int = 0) -> bool:
        """Whether the layer gets a tuple as one argument.

        Args:
            layer: the layer.
            others: the number of its other positional arguments.

        Example:
            >>> from torch import nn
            >>> rule = TupleRule.BY_SIGNATURE
            >>> rule.keeps_whole(nn.Linear(1, 1)), rule.keeps_whole(nn.Bilinear(1, 1, 1))
            (True, False)
        """
        return self is TupleRule.WHOLE or (self is TupleRule.BY_SIGNATURE and _takes_only_one(layer, others))

    def arguments(self, value: Any, layer: nn.Module, others: int = 0) -> tuple[Any, ...]:
        """The positional arguments of a layer for the output of the layer before.

        Example:
            >>> from torch import nn
            >>> TupleRule.SPREAD.arguments((1, 2), nn.Identity()), TupleRule.WHOLE.arguments((1, 2), nn.Identity())
            ((1, 2), ((1, 2),))
        """
        return value if type(value) is tuple and not self.keeps_whole(layer, others) else (value,)


def _takes_only_one(module: nn.Module, others: int) -> bool:
    module = torch_private.uncompiled(module)  # torch.compile wraps a module in one that takes anything
    try:
        parameters = signature_of(module.forward).parameters.values()
    except (TypeError, ValueError):
        return False
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return len(positional) == 1 + others and all(p.kind is not p.VAR_POSITIONAL for p in parameters)
