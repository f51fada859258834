"""The weights of micro-batches in the mean of a loss that leaves out some targets, or weighs classes.

`cross_entropy` divides by the weights of the targets that count, not by rows: over a mini-batch whose micro-batches
have unequal numbers of padded targets, a mean by rows is another one.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Self

import torch
from torch import Tensor, nn
from torch.nn import functional

if TYPE_CHECKING:
    from collections.abc import Sequence

IGNORED: Final = -100  # PyTorch's default, which tokenizers and data collators use, too
_FUNCTIONS: Final = (functional.cross_entropy, functional.nll_loss)
_MODULES: Final = (nn.CrossEntropyLoss, nn.NLLLoss)


@dataclass(frozen=True)
class CountedTargets:
    """Which targets a loss counts, and how much.

    Attributes:
        ignored: the target that does not count.
        weight: of each class; None: all count alike.
    """

    ignored: int = IGNORED
    weight: Tensor | None = None

    @classmethod
    def of(cls, function: Any) -> Self | None:
        """Of a loss function of PyTorch's, perhaps with bound arguments; None: it is another function.

        Example:
            >>> CountedTargets.of(nn.CrossEntropyLoss(ignore_index=0))
            CountedTargets(ignored=0, weight=None)
            >>> CountedTargets.of(functional.mse_loss) is None
            True
        """
        if type(function) in _MODULES:
            return cls(function.ignore_index, function.weight)
        bound: dict[str, Any] = {}
        if isinstance(function, functools.partial) and not function.args:
            function, bound = function.func, function.keywords
        if function not in _FUNCTIONS:
            return None
        return cls(bound.get("ignore_index", IGNORED), bound.get("weight"))

    def amounts(self, targets: Sequence[Any]) -> list[float] | None:
        """How much the target of each micro-batch counts; None: they are no numbers of classes, and rows count.

        Example:
            >>> CountedTargets().amounts([torch.tensor([1, 2]), torch.tensor([3, -100])])
            [2.0, 1.0]
        """
        if not all(isinstance(target, Tensor) and not target.is_floating_point() for target in targets):
            return None
        # One transfer for all: on an accelerator each one waits.
        return torch.stack([self._amount(target) for target in targets]).tolist()

    def _amount(self, target: Tensor) -> Tensor:
        counted = target != self.ignored
        if self.weight is None:
            return counted.sum().double()
        classes = target[counted]
        return self.weight.to(target.device)[classes].sum().double()


def unequal_padding(targets: Sequence[Any], rows: Sequence[int]) -> bool:
    """Whether the share of targets with the value -100 differs between micro-batches; only looked at on the CPU.

    Example:
        >>> unequal_padding([torch.tensor([1, 2]), torch.tensor([3, -100])], [2, 2])
        True
    """
    if not all(type(t) is Tensor and t.dtype is torch.int64 and t.device.type == "cpu" for t in targets):
        return False
    counts = [int((target == IGNORED).sum()) for target in targets]
    return any(counts) and any(count * rows[0] != counts[0] * row for count, row in zip(counts, rows, strict=True))
