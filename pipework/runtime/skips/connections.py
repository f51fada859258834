r"""Skip connections between stages: a tensor goes straight from the stage that stashes it to those that pop it.

    stage 0  -- value --> stage 1 -- value --> stage 2        gradients take the same ways back
        \________________ skip ________________/

A stage treats popped tensors as further inputs and stashed tensors as further outputs: they are cut from the graph,
kept for a recomputation, differentiated and freed like the others. This file separates them from the value and sends
them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from pipework.autograd import boundary

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence

    from torch import Tensor

    from pipework.runtime.transport import Endpoint, Send
    from pipework.values.nested import Structure


@dataclass(frozen=True)
class Skip:
    """A skip connection.

    Attributes:
        key: the name by which layers stash and pop.
        source: the stage that stashes.
        destinations: the stages that pop.
    """

    key: Hashable
    source: int
    destinations: tuple[int, ...]


class Bundle(NamedTuple):
    """The structure of a stage's tensors with skips: first the tensors of the value, then those of the skips.

    Attributes:
        structure: of the value.
        own: how many tensors belong to the value.
        present: for each skip whether it is a tensor; a layer may stash None.
    """

    structure: Structure | None
    own: int
    present: tuple[bool, ...]


class SkipPorts:
    """Sends and receives the skips of one stage.

    Args:
        stage: its number.
        skips: all of the pipe.
    """

    def __init__(self, stage: int, skips: Sequence[Skip]) -> None:
        self._stage = stage
        numbered = list(enumerate(skips))
        self._incoming = [(n, skip) for n, skip in numbered if stage in skip.destinations and stage != skip.source]
        self._outgoing = [
            (n, skip) for n, skip in numbered if stage == skip.source and any(d != stage for d in skip.destinations)
        ]
        self.touched = any(stage == skip.source or stage in skip.destinations for skip in skips)
        self._present_in: dict[int, tuple[bool, ...]] = {}
        self._present_out: dict[int, tuple[bool, ...]] = {}

    def connect(self, endpoint: Endpoint) -> None:
        """Prepares for one run of the worker."""
        self._receive = endpoint.receive
        self._senders: list[list[Send]] = [
            [endpoint.sender(f"F skip {n}", stage) for stage in skip.destinations if stage != self._stage]
            for n, skip in self._outgoing
        ]
        self._gradient_senders: list[Send] = [
            endpoint.sender(f"B skip {n} from {self._stage}", skip.source) for n, skip in self._incoming
        ]

    def receive(
        self, micro_batch: int, leaves: tuple[Tensor, ...], structure: Structure | None
    ) -> tuple[tuple[Tensor, ...], Bundle]:
        """Waits for the tensors that the stage pops, and appends them to its inputs."""
        skips: list[Tensor] = []
        present = []
        for n, _ in self._incoming:
            tensors, _ = self._receive((f"F skip {n}", self._stage, micro_batch))
            skips += tensors
            present.append(bool(tensors))
        self._present_in[micro_batch] = tuple(present)
        return leaves + tuple(skips), Bundle(structure, len(leaves), tuple(present))

    def send(self, micro_batch: int, tensors: Sequence[Tensor], present: tuple[bool, ...]) -> None:
        """Sends the stashed tensors to every stage that pops them, each as a leaf of its own."""
        self._present_out[micro_batch] = present
        remaining = iter(tensors)
        for senders, is_tensor in zip(self._senders, present, strict=True):
            tensor = next(remaining) if is_tensor else None
            for send in senders:
                send(micro_batch, () if tensor is None else (boundary.cut(tensor),), None)

    def stashed(self, tensors: Sequence[Tensor], present: tuple[bool, ...]) -> list[tuple[int, Tensor]]:
        """The stashed tensors, each with the number of its skip."""
        numbers = [n for (n, _), is_tensor in zip(self._outgoing, present, strict=True) if is_tensor]
        return list(zip(numbers, tensors, strict=True))

    def receive_gradients(self, micro_batch: int) -> tuple[Tensor | None, ...]:
        """Waits for the gradients of stashed tensors: sums over the stages that popped them, the last first."""
        gradients = []
        for (n, skip), is_tensor in zip(self._outgoing, self._present_out[micro_batch], strict=True):
            total: Tensor | None = None
            for stage in sorted(skip.destinations, reverse=True):
                if stage != self._stage:
                    (part,) = self._receive((f"B skip {n} from {stage}", self._stage, micro_batch))[0]
                    total = part if total is None else total if part is None else total + part
            if is_tensor:
                gradients.append(total)
        return tuple(gradients)

    def send_gradients(self, micro_batch: int, gradients: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
        """Sends the gradients of popped tensors to the stages that stashed them. Returns those of the value."""
        present = self._present_in[micro_batch]
        own = len(gradients) - sum(present)
        remaining = iter(gradients[own:])
        for send, is_tensor in zip(self._gradient_senders, present, strict=True):
            send(micro_batch, (next(remaining) if is_tensor else None,), None)
        return gradients[:own]

    def tracker(self, aliases: Sequence[Tensor], present: tuple[bool, ...]) -> StageTracker:
        """The tracker for the stage's layers while they run on one micro-batch."""
        remaining = iter(aliases)
        popped = {
            skip.key: next(remaining) if is_tensor else None
            for (_, skip), is_tensor in zip(self._incoming, present, strict=True)
        }
        return StageTracker(popped, [skip.key for _, skip in self._outgoing])


class StageTracker:
    """The `SkipTracker` of one stage and micro-batch: holds what its layers pop, collects what they stash."""

    def __init__(self, popped: dict[Hashable, Tensor | None], outgoing: Sequence[Hashable]) -> None:
        self._tensors = popped
        self._outgoing = outgoing

    def save(self, key: Hashable, tensor: Tensor | None, poppers: int) -> None:
        """See `SkipTracker.save`."""
        self._tensors[key] = tensor

    def load(self, key: Hashable) -> Tensor | None:
        """See `SkipTracker.load`."""
        return self._tensors[key]

    def outgoing(self) -> tuple[Tensor | None, ...]:
        """The tensors stashed for other stages."""
        return tuple([self._tensors[key] for key in self._outgoing])
