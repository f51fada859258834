r"""Skip connections between stages: a tensor goes straight from the stage that stashes it to those that pop it.

    stage 0  -- value --> stage 1 -- value --> stage 2        gradients take the same ways back
        \________________ skip ________________/

A stage treats popped tensors as further inputs and stashed tensors as further outputs: they are cut from the graph,
kept for a recomputation, differentiated and freed like the others. This file separates them from the value and sends
them.

If several stages of one place (a process, or a device) pop, the value is sent there once, and its gradient is summed
there as far as the order of the sum allows, see `Skip`.
"""

from __future__ import annotations

import itertools
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
        destinations: the stages that pop, in ascending order; the source may be among them.
        places: of each stage of the pipe, where its tensors are: its process, or its device.
    """

    key: Hashable
    source: int
    destinations: tuple[int, ...]
    places: tuple[Hashable, ...]

    @property
    def later(self) -> tuple[int, ...]:
        """The stages that pop, without the source, whose own layers use the tensor directly."""
        return tuple(stage for stage in self.destinations if stage != self.source)

    def value_from(self, stage: int) -> int:
        """The stage that hands the value to this one: the last one before it in the same place, else the source.

        Example:
            >>> skip = Skip("a", 0, (1, 2, 3), places=(0, 1, 0, 1))
            >>> [skip.value_from(stage) for stage in (1, 2, 3)]
            [0, 0, 1]
        """
        earlier = [each for each in self.later if each < stage and self.places[each] == self.places[stage]]
        return earlier[-1] if earlier else self.source

    def gradient_to(self, stage: int) -> int:
        """The stage to which this one hands the gradient: the one below it that adds its own to it, else the source.

        Autograd sums in one order, from the last stage that pops to the first, and another order gives other bits. So
        only the gradients at the beginning of the sum can be summed before they are sent: those of the stages from the
        last one down to the first one that is in another place.

        Example:
            >>> skip = Skip("a", 0, (1, 2, 3, 5), places=(0, 1, 0, 1, 0, 1))  # (5 + 3) is sent, then 2 and 1 are added
            >>> [skip.gradient_to(stage) for stage in (1, 2, 3, 5)]
            [0, 0, 0, 3]
        """
        for stage_below, above in reversed(list(itertools.pairwise(self.later))):
            if self.places[stage_below] != self.places[self.later[-1]]:
                break
            if above == stage:
                return stage_below
        return self.source

    @property
    def hops(self) -> frozenset[tuple[int, int]]:
        """The pairs of stages of which one hands the value, or the gradient, to the other; the lower stage first."""
        values = {(self.value_from(stage), stage) for stage in self.later}
        return frozenset(values | {(self.gradient_to(stage), stage) for stage in self.later})


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
        self._incoming = [(n, skip) for n, skip in numbered if stage in skip.later]
        self._outgoing = [(n, skip) for n, skip in numbered if stage == skip.source and skip.later]
        # Names of the gradients that later stages hand to this one, in the order of their sum.
        self._summands = {
            n: [f"B skip {n} from {each}" for each in reversed(skip.later) if skip.gradient_to(each) == stage]
            for n, skip in (*self._incoming, *self._outgoing)
        }
        self.touched = any(stage == skip.source or stage in skip.destinations for skip in skips)
        self._present_in: dict[int, tuple[bool, ...]] = {}
        self._present_out: dict[int, tuple[bool, ...]] = {}

    def connect(self, endpoint: Endpoint) -> None:
        """Prepares for one run of the worker."""
        self._receive = endpoint.receive

        def senders(n: int, skip: Skip) -> list[Send]:
            to = [each for each in skip.later if skip.value_from(each) == self._stage]
            return [endpoint.sender(f"F skip {n}", stage) for stage in to]

        self._senders = [senders(n, skip) for n, skip in self._outgoing]
        self._senders_on = [senders(n, skip) for n, skip in self._incoming]
        self._gradient_senders: list[Send] = [
            endpoint.sender(f"B skip {n} from {self._stage}", skip.gradient_to(self._stage))
            for n, skip in self._incoming
        ]

    def receive(
        self, micro_batch: int, leaves: tuple[Tensor, ...], structure: Structure | None
    ) -> tuple[tuple[Tensor, ...], Bundle]:
        """Waits for the tensors that the stage pops, hands them on, and appends them to its inputs."""
        skips: list[Tensor] = []
        present = []
        for (n, _), senders in zip(self._incoming, self._senders_on, strict=True):
            tensors, _ = self._receive((f"F skip {n}", self._stage, micro_batch))
            _hand_on(senders, micro_batch, tensors)
            skips += tensors
            present.append(bool(tensors))
        self._present_in[micro_batch] = tuple(present)
        return leaves + tuple(skips), Bundle(structure, len(leaves), tuple(present))

    def send(self, micro_batch: int, tensors: Sequence[Tensor], present: tuple[bool, ...]) -> None:
        """Sends the stashed tensors on their ways to the stages that pop them."""
        self._present_out[micro_batch] = present
        remaining = iter(tensors)
        for senders, is_tensor in zip(self._senders, present, strict=True):
            _hand_on(senders, micro_batch, (next(remaining),) if is_tensor else ())

    def stashed(self, tensors: Sequence[Tensor], present: tuple[bool, ...]) -> list[tuple[int, Tensor]]:
        """The stashed tensors, each with the number of its skip."""
        numbers = [n for (n, _), is_tensor in zip(self._outgoing, present, strict=True) if is_tensor]
        return list(zip(numbers, tensors, strict=True))

    def popped(self, present: tuple[bool, ...]) -> list[int]:
        """The numbers of the skips of the popped tensors."""
        return [n for (n, _), is_tensor in zip(self._incoming, present, strict=True) if is_tensor]

    def receive_gradients(self, micro_batch: int) -> tuple[Tensor | None, ...]:
        """Waits for the gradients of stashed tensors: sums over the stages that popped them, the last first."""
        present = self._present_out[micro_batch]
        sums = [self._received_sum(n, micro_batch) for n, _ in self._outgoing]
        return tuple([total for total, is_tensor in zip(sums, present, strict=True) if is_tensor])

    def send_gradients(self, micro_batch: int, gradients: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
        """Sends the gradients of popped tensors towards the stages that stashed them. Returns those of the value."""
        present = self._present_in[micro_batch]
        own = len(gradients) - sum(present)
        remaining = iter(gradients[own:])
        for (n, _), send, is_tensor in zip(self._incoming, self._gradient_senders, present, strict=True):
            total = _sum(self._received_sum(n, micro_batch), next(remaining) if is_tensor else None)
            send(micro_batch, (total,), None)
        return gradients[:own]

    def _received_sum(self, n: int, micro_batch: int) -> Tensor | None:
        """The sum of the gradients that later stages hand to this one."""
        total: Tensor | None = None
        for name in self._summands[n]:
            total = _sum(total, *self._receive((name, self._stage, micro_batch))[0])
        return total

    def tracker(self, aliases: Sequence[Tensor], present: tuple[bool, ...]) -> StageTracker:
        """The tracker for the stage's layers while they run on one micro-batch."""
        remaining = iter(aliases)
        popped = {
            skip.key: next(remaining) if is_tensor else None
            for (_, skip), is_tensor in zip(self._incoming, present, strict=True)
        }
        return StageTracker(popped, [skip.key for _, skip in self._outgoing])


def _hand_on(senders: Sequence[Send], micro_batch: int, tensors: Sequence[Tensor]) -> None:
    """Sends a skip's tensor to other stages, to each as a leaf of its own; no tensors: None was stashed."""
    for send in senders:
        send(micro_batch, tuple(map(boundary.cut, tensors)), None)


def _sum(total: Tensor | None, part: Tensor | None) -> Tensor | None:
    return part if total is None else total if part is None else total + part


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
