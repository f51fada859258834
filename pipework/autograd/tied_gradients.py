"""Gradients of parameters that several stages of a process use, added up as if there were no stages.

Autograd adds the uses of a parameter within a micro-batch from the last one to the first, and the sum to `.grad`. So a
stage hands what its backward has found for one micro-batch to the stage before that uses the parameter, too:

    stage 2    its uses of micro-batch i -+
    stage 1                               +-> its uses -+
    stage 0                                             +-> its uses -> .grad, after that of micro-batch i - 1

A gradient waits until the other stage goes backward with the same micro-batch. Where backwards are split, the gradient
of such a parameter is computed in I.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

from pipework.autograd.weight_split.operation import DeferrableAlias

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from pipework.autograd.aliases import Aliases


class TiedGradients:
    """The parameters that one stage shares with others."""

    __slots__ = ("_from_later", "_to_earlier")

    def __init__(self) -> None:
        # Aliases of this stage, each with the gradients that wait, by micro-batch.
        self._from_later: list[tuple[Tensor, dict[int, Tensor]]] = []
        self._to_earlier: list[tuple[Tensor, dict[int, Tensor]]] = []

    def connect(self, alias: Tensor, later: TiedGradients, alias_there: Tensor) -> None:
        """This stage begins with what the other one finds."""
        waiting: dict[int, Tensor] = {}
        self._from_later.append((alias, waiting))
        later._to_earlier.append((alias_there, waiting))

    def begun(self, micro_batch: int) -> list[tuple[Tensor, Tensor]]:
        """The aliases whose gradients a later stage has begun, with these gradients: further roots of the backward."""
        return [(alias, waiting.pop(micro_batch)) for alias, waiting in self._from_later if micro_batch in waiting]

    def hand_on(self, micro_batch: int) -> None:
        """After the backward: gives the gradients to the stages that go on with them."""
        for alias, waiting in self._to_earlier:
            if alias.grad is not None:
                waiting[micro_batch], alias.grad = alias.grad, None

    def clear(self) -> None:
        """Drops everything, after a failure."""
        for _, waiting in (*self._from_later, *self._to_earlier):
            waiting.clear()


def tied_gradients(stages: Mapping[int, Aliases]) -> dict[int, TiedGradients]:
    """For each stage of this process that shares parameters with another one, which they are."""
    every = [parameter for aliases in stages.values() for parameter in aliases.parameters]
    if len({id(parameter) for parameter in every}) == len(every):
        return {}
    users: dict[int, list[tuple[int, Tensor]]] = {}
    for stage, aliases in sorted(stages.items()):
        for parameter, alias in zip(aliases.parameters, aliases.leaves, strict=True):
            users.setdefault(id(parameter), []).append((stage, alias))
    tied: dict[int, TiedGradients] = {}
    for found in users.values():
        for (earlier, alias), (later, alias_there) in itertools.pairwise(found):
            first, second = (tied.setdefault(stage, TiedGradients()) for stage in (earlier, later))
            first.connect(alias, second, alias_there)
            for each in (alias, alias_there):
                if isinstance(each, DeferrableAlias):
                    each.deferred = False
    return tied
