"""What is known of a loss function: what is inside of partials and compiled wrappers, and which targets it counts.

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


def unwrapped(function: Any) -> tuple[Any, dict[str, Any], bool]:
    """The function or module inside of partials and compiled wrappers, and what the partials bind.

    Returns:
        The innermost function; the keywords that partials bind, where an outer one's replace those of an inner one; and
        whether partials bind positional arguments, too.

    Example:
        >>> function, keywords, _ = unwrapped(functools.partial(functional.cross_entropy, ignore_index=0))
        >>> function is functional.cross_entropy, keywords
        (True, {'ignore_index': 0})
    """
    keywords: dict[str, Any] = {}
    binds_positions = False
    while True:
        inside = torch_private.uncompiled(function)
        if isinstance(function, functools.partial):
            keywords = {**function.keywords, **keywords}
            binds_positions = binds_positions or bool(function.args)
            inside = function.func
        if inside is function:
            return function, keywords, binds_positions
        function = inside


def may_be_other(function: Any) -> bool:
    """Whether a loss function may be no mean or sum over rows: it is none of PyTorch's, which say what they are.

    Example:
        >>> may_be_other(nn.MSELoss()), may_be_other(nn.functional.l1_loss), may_be_other(lambda output, target: output)
        (False, False, True)
    """
    function, _, _ = unwrapped(function)
    if isinstance(function, nn.Module):
        return type(function).__module__ != nn.modules.loss.__name__
    return function is not None and getattr(function, "__module__", "") != functional.__name__


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
    inner, bound, _ = unwrapped(function)
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
        function, bound, binds_positions = unwrapped(function)
        if isinstance(function, _MODULES) and type(function).forward in _FORWARDS and not binds_positions:
            return cls(function.ignore_index, function.weight)
        if function not in _FUNCTIONS or binds_positions:
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
