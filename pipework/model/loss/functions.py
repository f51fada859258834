"""What is known of a loss function: what is inside of partials and compiled wrappers, and which targets it counts.

`cross_entropy` divides by the weights of the targets that count, not by rows: over a mini-batch whose micro-batches
have unequal numbers of padded targets, a mean by rows is another one.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence

from pipework import torch_private
from pipework.runtime.device import is_accelerator
from pipework.signatures import signature_of

if TYPE_CHECKING:
    from collections.abc import Sequence

IGNORED: Final = -100  # PyTorch's default, which tokenizers and data collators use, too
_FUNCTIONS: Final = (functional.cross_entropy, functional.nll_loss)
_MODULES: Final = (nn.CrossEntropyLoss, nn.NLLLoss)
_FORWARDS: Final = tuple([module.forward for module in _MODULES])


class InnerFunction(NamedTuple):
    """A function without what is around it.

    Attributes:
        function: the innermost one, or the module.
        keywords: that partials bind; an outer one's replace those of an inner one.
        binds_positions: whether partials bind positional arguments, too, so that others are passed to the function.

    Example:
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


def function_identity(function: Any) -> list[Any] | None:
    """The name of a function and its plain settings, as JSON values, which are the same in all processes.

    Of PyTorch's own functions and modules all plain settings count. Of others only floats that are arguments do: an
    integer or a text may be the number of a process or its device, another attribute may be a time; these differ
    rightly.

    Args:
        function: a function, a `functools.partial`, or an object that can be called; None gives None.

    Example:
        >>> function_identity(nn.CrossEntropyLoss(label_smoothing=0.1))[1]["label_smoothing"]
        0.1
        >>> function_identity(lambda output, target: (output - target).abs().sum())
        ['<lambda>', {}]
    """
    if function is None:
        return None
    inner, bound, _ = InnerFunction.of(function)
    named = inner if isinstance(getattr(inner, "__qualname__", None), str) else type(inner)
    is_of_torch = str(named.__module__).partition(".")[0] == "torch"
    settings = dict(bound) if named is inner else {**getattr(inner, "__dict__", {}), **bound}
    if named is not inner and not is_of_torch:
        arguments = signature_of(named.__init__).parameters
        settings = {name: value for name, value in settings.items() if name in arguments or name in bound}
    kinds = (bool, int, float, str) if is_of_torch else (float,)
    plain = {
        name: value
        for name, value in settings.items()
        if type(value) in kinds and name != "training" and not name.startswith("_")
    }
    return [named.__qualname__, plain]


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
