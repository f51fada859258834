"""The layers of stages, from those of a model and a balance."""

from __future__ import annotations

from collections import OrderedDict
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any

from torch import nn

if TYPE_CHECKING:
    from collections.abc import Sequence


def grouped(layers: Sequence[tuple[str, Any]], balance: Sequence[int]) -> list[nn.Sequential]:
    """A module for each stage, with so many of the named layers, which keep their names.

    Example:
        >>> [list(stage._modules) for stage in grouped([(name, nn.ReLU()) for name in "abc"], [1, 2])]
        [['a'], ['b', 'c']]
    """
    ends = list(accumulate(balance, initial=0))
    return [nn.Sequential(OrderedDict(layers[begin:end])) for begin, end in pairwise(ends)]
