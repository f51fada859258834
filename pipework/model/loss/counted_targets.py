"""The weights of micro-batches in the mean of a loss that leaves out some targets, or weighs classes.

`cross_entropy` divides by the weights of the targets that count, not by rows: over a mini-batch whose micro-batches
have unequal numbers of padded targets, a mean by rows is another one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Self

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence

from pipework.model.loss.inner_function import InnerFunction
from pipework.runtime.device import is_accelerator

if TYPE_CHECKING:
    from collections.abc import Sequence

IGNORED: Final = -100  # PyTorch's default, which tokenizers and data collators use, too
_FUNCTIONS: Final = (functional.cross_entropy, functional.nll_loss)
_MODULES: Final = (nn.CrossEntropyLoss, nn.NLLLoss)
_FORWARDS: Final = tuple([module.forward for module in _MODULES])


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
        """Of a loss of PyTorch's, compiled or bound as a partial, too; None: it is another function.

        Example:
            >>> CountedTargets.of(nn.CrossEntropyLoss(ignore_index=0))
            CountedTargets(ignored=0, weight=None)
            >>> CountedTargets.of(functional.mse_loss) is None
            True
        """
        inner = InnerFunction.of(function)
        function, bound = inner.function, inner.keywords
        if inner.binds_positions:
            return None
        if isinstance(function, _MODULES) and type(function).forward in _FORWARDS:
            return cls(function.ignore_index, function.weight)
        if function not in _FUNCTIONS:
            return None
        return cls(bound.get("ignore_index", IGNORED), bound.get("weight"))

    def amounts(self, targets: Sequence[Any]) -> list[float] | Tensor | None:
        """How much the target of each micro-batch counts; None: they are no numbers of classes, and rows count.

        On an accelerator the numbers stay there, as one tensor, unless classes have weights: these may sum to 0 where
        targets count, and whoever takes the mean must know that beforehand.

        Example:
            >>> CountedTargets().amounts([torch.tensor([1, 2]), torch.tensor([3, -100])])
            [2.0, 1.0]
        """
        if not all(isinstance(target, Tensor) and not target.is_floating_point() for target in targets):
            return None
        # On an accelerator each transfer waits: one for all, and nothing here has a size that depends on values.
        # Bytes would wrap around in a comparison with -100.
        flat = [target.flatten().long() for target in targets]
        together = pad_sequence(flat, batch_first=True, padding_value=self.ignored)
        ignored = together == self.ignored
        if self.weight is None:
            counts = (~ignored).sum(1)
            if is_accelerator(counts.device):
                return counts
        else:
            weight = self.weight.to(together.device, torch.promote_types(self.weight.dtype, torch.float32))
            counts = weight[together.masked_fill(ignored, 0)].masked_fill(ignored, 0).sum(1)
        return list(map(float, counts.tolist()))


def ignored_by(function: Any) -> int:
    """The target that a loss function leaves out, if it says so by `ignore_index`; else PyTorch's default.

    Example:
        >>> ignored_by(nn.CrossEntropyLoss(ignore_index=0)), ignored_by(functional.nll_loss)
        (0, -100)
    """
    inner = InnerFunction.of(function)
    ignored = inner.keywords.get("ignore_index", getattr(inner.function, "ignore_index", IGNORED))
    return ignored if isinstance(ignored, int) else IGNORED


def unequal_padding(targets: Sequence[Any], rows: Sequence[int], ignored: int = IGNORED) -> bool:
    """Whether the share of targets with the value `ignored` differs between micro-batches; only looked at on the CPU.

    Example:
        >>> unequal_padding([torch.tensor([1, 2]), torch.tensor([3, -100])], [2, 2])
        True
    """
    if not all(type(t) is Tensor and t.dtype is torch.int64 and t.device.type == "cpu" for t in targets):
        return False
    counts = [int((target == ignored).sum()) for target in targets]
    return any(counts) and any(count * rows[0] != counts[0] * row for count, row in zip(counts, rows, strict=True))
