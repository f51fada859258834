"""Gradients of parameters that several stages of a process use, added up as if there were no stages.

Autograd adds the uses of a parameter within a micro-batch from the last one to the first, and the sum to `.grad`. So a
stage hands what its backward has found for one micro-batch to the stage before that uses the parameter, too:

    stage 2    its uses of micro-batch i -+
    stage 1                               +-> its uses -+
    stage 0                                             +-> its uses -> .grad, after that of micro-batch i - 1

`TiedGradients` is an adapter around the functions by which a stage receives and sends gradients: what it hands on
travels beside them, as a message of its own for each parameter. Where backwards are split, the gradient of such a
parameter is computed in I.
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

    Message: TypeAlias = tuple[tuple[Any, ...], Any]
    Receive: TypeAlias = Callable[[int], Message]
    Send: TypeAlias = Callable[[int, Message], None]


class TiedGradients:
    """The parameters that one stage shares with others.

    Args:
        stage: its number.
    """

    __slots__ = ("_arrived", "_from_later", "_leaving", "_receivers", "_senders", "_stage", "_to_earlier")

    def __init__(self, stage: int) -> None:
        self._stage = stage
        # Aliases of this stage, each with the name of the messages of its gradient; the second ones also with the
        # stage that these go to.
        self._from_later: list[tuple[Tensor, str]] = []
        self._to_earlier: list[tuple[Tensor, str, int]] = []
        self._receivers: list[Receive] = []
        self._senders: list[Send] = []
        self._arrived: dict[int, list[tuple[Tensor, Tensor]]] = {}  # by micro-batch, as the next
        self._leaving: dict[int, list[Tensor | None]] = {}

    def connect(self, name: str, alias: Tensor, later: TiedGradients, alias_there: Tensor) -> None:
        """The backward of this stage begins with the gradient that the later stage has found.

        Args:
            name: of the messages.
            alias: of this stage.
            later: the later stage.
            alias_there: its alias of the same parameter.
        """
        self._from_later.append((alias, name))
        later._to_earlier.append((alias_there, name, self._stage))

    def open(self, sender: Callable[[str, int], Send], receiver: Callable[[str, int], Receive]) -> None:
        """Before a run: looks up the functions that send and receive, see `Endpoint`."""
        self._receivers = [receiver(name, self._stage) for _, name in self._from_later]
        self._senders = [sender(name, stage) for _, name, stage in self._to_earlier]

    def receive_gradients(self, receive: Receive, micro_batch: int) -> Message:
        """Receives the gradients of the outputs, and those that later stages hand on."""
        message = receive(micro_batch)
        arrived = self._arrived[micro_batch] = []
        for (alias, _), receive_tied in zip(self._from_later, self._receivers, strict=True):
            (gradient,), _ = receive_tied(micro_batch)
            if gradient is not None:
                arrived.append((alias, gradient))
        return message

    def begun(self, micro_batch: int) -> list[tuple[Tensor, Tensor]]:
        """Further roots of the backward: each alias whose gradient a later stage has begun, with that gradient."""
        return self._arrived.pop(micro_batch)

    def hand_on(self, micro_batch: int) -> list[Tensor]:
        """After the backward: takes the gradients to which earlier stages add theirs. Returns their aliases."""
        self._leaving[micro_batch] = [alias.grad for alias, _, _ in self._to_earlier]
        found = [alias for alias, _, _ in self._to_earlier if alias.grad is not None]
        for alias in found:
            alias.grad = None
        return found

    def send_gradients(self, send: Send | None, micro_batch: int, message: Message) -> None:
        """Sends the gradients of the inputs, if anybody wants them, and those that are handed on."""
        # Nothing was differentiated if no output needs a gradient.
        leaving = self._leaving.pop(micro_batch, [None] * len(self._senders))
        for send_tied, gradient in zip(self._senders, leaving, strict=True):
            send_tied(micro_batch, ((gradient,), None))
        if send is not None:
            send(micro_batch, message)

    def clear(self) -> None:
        """Drops everything, after a failure."""
        self._arrived.clear()
        self._leaving.clear()


def tied_gradients(stages: Mapping[int, Aliases], link: Callable[[int, int], object]) -> dict[int, TiedGradients]:
    """The shared parameters of each stage of this process, by its number; a stage that shares none is left out.

    Args:
        stages: by number.
        link: makes the link from one stage's device to another's, if there is none.
    """
    every = [parameter for aliases in stages.values() for parameter in aliases.parameters]
    if len({id(parameter) for parameter in every}) == len(every):
        return {}
    users: dict[int, list[tuple[int, Tensor]]] = {}
    for stage, aliases in sorted(stages.items()):
        for parameter, alias in zip(aliases.parameters, aliases.leaves, strict=True):
            users.setdefault(id(parameter), []).append((stage, alias))
    tied: dict[int, TiedGradients] = {}
    for number, found in enumerate(users.values()):
        for (earlier, alias), (later, alias_there) in itertools.pairwise(found):
            link(later, earlier)
            first, second = (tied.setdefault(stage, TiedGradients(stage)) for stage in (earlier, later))
            first.connect(f"B tied {number}", alias, second, alias_there)
            for each in (alias, alias_there):
                if isinstance(each, DeferrableAlias):
                    each.deferred = False
    return tied
