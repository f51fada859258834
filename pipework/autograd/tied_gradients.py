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
    from collections.abc import Callable, Mapping
    from typing import Any, TypeAlias

    from torch import Tensor

    from pipework.autograd.aliases import Aliases
    from pipework.runtime.device import Link

    Departed: TypeAlias = tuple[tuple[Any, ...], Any]  # a gradient, and the event after which it may be read


class TiedGradients:
    """The parameters that one stage shares with others."""

    __slots__ = ("_from_later", "_to_earlier")

    def __init__(self) -> None:
        # Aliases of this stage, each with the gradients that wait, by micro-batch, and the link on which they travel.
        self._from_later: list[tuple[Tensor, dict[int, Departed], Link | None]] = []
        self._to_earlier: list[tuple[Tensor, dict[int, Departed], Link | None]] = []

    def connect(self, alias: Tensor, later: TiedGradients, alias_there: Tensor, link: Link | None) -> None:
        """The backward of this stage begins with the gradient that the later stage has found, sent over the link."""
        waiting: dict[int, Departed] = {}
        self._from_later.append((alias, waiting, link))
        later._to_earlier.append((alias_there, waiting, link))

    def begun(self, micro_batch: int) -> list[tuple[Tensor, Tensor]]:
        """Further roots of the backward: each alias whose gradient a later stage has begun, with that gradient."""
        found = []
        for alias, waiting, link in self._from_later:
            if micro_batch in waiting:
                (gradient,), event = waiting.pop(micro_batch)
                if link is not None:
                    link.arrive((gradient,), event)
                found.append((alias, gradient))
        return found

    def hand_on(self, micro_batch: int) -> list[Tensor]:
        """After the backward: sends the gradients to the earlier stages, which add theirs. Returns their aliases."""
        found = [each for each in self._to_earlier if each[0].grad is not None]
        for alias, waiting, link in found:
            waiting[micro_batch] = ((alias.grad,), None) if link is None else link.depart((alias.grad,))
            alias.grad = None
        return [alias for alias, _, _ in found]

    def clear(self) -> None:
        """Drops everything, after a failure."""
        for _, waiting, _ in (*self._from_later, *self._to_earlier):
            waiting.clear()


def tied_gradients(stages: Mapping[int, Aliases], link: Callable[[int, int], Link | None]) -> dict[int, TiedGradients]:
    """The shared parameters of each stage of this process, by its number; a stage that shares none is left out.

    Args:
        stages: by number.
        link: gives the link from one stage's device to another's; None: tensors are passed by reference.
    """
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
            first.connect(alias, second, alias_there, link(later, earlier))
            for each in (alias, alias_there):
                if isinstance(each, DeferrableAlias):
                    each.deferred = False
    return tied
