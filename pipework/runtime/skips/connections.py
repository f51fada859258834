r"""Skip connections between stages: a tensor goes straight from the stage that stashes it to those that pop it.

    stage 0  -- value --> stage 1 -- value --> stage 2        gradients take the same ways back
        \________________ skip ________________/

A stage treats popped tensors as further inputs and stashed tensors as further outputs: they are cut from the graph,
kept for a recomputation, differentiated and freed like the others. This file separates them from the value and sends
them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from pipework.autograd import boundary
from pipework.runtime.skips.stashed import Stashed, StashedTensors

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence
    from typing import Any

    from torch import Tensor

    from pipework.runtime.skips.skip import Skip
    from pipework.runtime.skips.stashed import Arrived
    from pipework.runtime.transport import Endpoint, Send
    from pipework.values.nested import Structure


class Bundle(NamedTuple):
    """The structure of a stage's tensors with skips: first the tensors of the value, then those of the skips.

    Attributes:
        structure: of the value.
        own: how many tensors belong to the value.
        present: for each skip whether it is a tensor; a layer may stash None.
        same: pairs of the number of a tensor of the value and the number of a skip with the very same tensor.
    """

    structure: Structure | None
    own: int
    present: tuple[bool, ...]
    same: tuple[tuple[int, int], ...] = ()


class SkipPorts:
    """Sends and receives the skips of one stage, in one mini-batch.

    Args:
        stage: its number.
        skips: all of the pipe.

    Attributes:
        any_gradients: whether gradients of skips may come to this stage or leave it.
    """

    def __init__(self, stage: int, skips: Sequence[Skip]) -> None:
        self._stage = stage
        self._skips = skips
        self._stashed = StashedTensors(stage, skips)
        numbered = list(enumerate(skips))
        self._incoming = [(n, skip) for n, skip in numbered if stage in skip.later]
        self._outgoing = [(n, skip) for n, skip in numbered if stage == skip.source and skip.later]
        self._popped_next = [(n, skip) for n, skip in self._incoming if stage + 1 in skip.later]
        self.any_gradients = any(stage in (skip.source, *skip.destinations, skip.stage_after_source) for skip in skips)
        self._present: dict[int, tuple[bool, ...]] = {}  # for each micro-batch, which of the incoming are tensors
        # For each micro-batch, which tensors of the received value are tensors of skips; see `Stashed.same`.
        self._same: dict[int, tuple[tuple[int, int], ...]] = {}
        # For each micro-batch, the popped skips whose tensors the source has returned, too.
        self._returned: dict[int, frozenset[int]] = {}
        self._awaited: dict[int, tuple[int | None, ...]] = {}

    def connect(self, endpoint: Endpoint) -> None:
        """Prepares for one run of the worker."""
        self._receivers = [endpoint.receiver(f"F skip {n}", self._stage) for n, _ in self._incoming]
        self._gradient_receivers = [endpoint.receiver(f"B skip {n}", self._stage) for n in range(len(self._skips))]

        def senders(n: int, skip: Skip) -> list[Send]:
            to = [each for each in skip.later if skip.value_from(each) == self._stage]
            return [endpoint.sender(f"F skip {n}", stage) for stage in to]

        self._senders = [senders(n, skip) for n, skip in self._outgoing]
        self._senders_on = [senders(n, skip) for n, skip in self._incoming]
        self._gradient_senders: list[Send] = [
            endpoint.sender(f"B skip {n}", skip.gradient_to(self._stage)) for n, skip in self._incoming
        ]
        self._senders_if_returned: dict[int, Send] = {
            n: endpoint.sender(f"B skip {n}", skip.stage_after_source)
            for n, skip in self._incoming
            if skip.stage_after_source is not None and skip.later[0] == self._stage
        }

    def receive(
        self, micro_batch: int, leaves: tuple[Tensor, ...], structure: Any
    ) -> tuple[tuple[Tensor, ...], Bundle, list[Arrived]]:
        """Waits for the tensors that the stage pops, hands them on, and appends them to its inputs.

        Returns:
            The inputs and their structure; and those of them that earlier stages have stashed.
        """
        arrived: list[Arrived] = []
        if isinstance(structure, Stashed):
            if structure.same:
                self._same[micro_batch] = structure.same
            arrived, structure = self._stashed.marked(leaves, structure), structure.structure
        popped: list[Tensor] = []
        present, returned = [], []
        for (n, _), receive, senders in zip(self._incoming, self._receivers, self._senders_on, strict=True):
            tensors, is_returned = receive(micro_batch)
            _hand_on(senders, micro_batch, tensors)
            popped += tensors
            present.append(bool(tensors))
            if is_returned:
                returned.append(n)
        bundle = Bundle(structure, len(leaves), tuple(present))
        self._present[micro_batch], self._returned[micro_batch] = bundle.present, frozenset(returned)
        arrived += self._stashed.popped(bundle.own, popped, self._popped(bundle.present))
        return leaves + tuple(popped), bundle, arrived

    def refuse_overwritten(self, arrived: Sequence[Arrived]) -> None:
        """See `StashedTensors`."""
        self._stashed.refuse_overwritten(arrived)

    def send(
        self, micro_batch: int, outputs: tuple[Tensor, ...], bundle: Bundle, arrived: Sequence[Arrived]
    ) -> tuple[tuple[Tensor, ...], Any]:
        """Sends the stashed tensors on their ways to the stages that pop them.

        Args:
            micro_batch: its number.
            outputs: of the stage, with what it stashes.
            bundle: their structure.
            arrived: the stashed tensors among the inputs.

        Returns:
            The tensors of the value, and its structure with marks for stashed tensors.
        """
        value, tensors = outputs[: bundle.own], outputs[bundle.own :]
        remaining, returned = iter(tensors), {n for _, n in bundle.same}
        stashed: list[tuple[int, Tensor]] = []
        if self._outgoing:
            for (n, skip), senders, is_tensor in zip(self._outgoing, self._senders, bundle.present, strict=True):
                own = (next(remaining),) if is_tensor else ()
                _hand_on(senders, micro_batch, own, is_returned=n in returned and skip.stage_after_source is not None)
                stashed += [(n, tensor) for tensor in own]
        # If the stage has returned a skip's tensor, the gradient of the value contains that of the skip.
        awaited = [*(n for n, _ in stashed), *self._continued(self._popped(self._present[micro_batch]))]
        passed = [n for _, n in self._passed(micro_batch)]
        self._awaited[micro_batch] = (*[None if n in returned else n for n in awaited], *passed)
        return value, self._stashed.marking(bundle.structure, value, arrived, stashed, bundle.same)

    def awaits(self, name: str, micro_batch: int) -> bool | None:
        """Whether a message of this name will come; None: it is known only after the forward."""
        if not name.startswith("B skip "):
            return True
        if micro_batch not in self._awaited:
            return None
        return int(name.removeprefix("B skip ")) in self._awaited[micro_batch]

    def _popped(self, present: tuple[bool, ...]) -> list[int]:
        """The numbers of the skips of the popped tensors."""
        return [n for (n, _), is_tensor in zip(self._incoming, present, strict=True) if is_tensor]

    def _continued(self, popped: Sequence[int]) -> list[int]:
        """Of these skips, the ones that later stages pop, too."""
        return [n for n in popped if self._stage < self._skips[n].later[-1]]

    def _passed(self, micro_batch: int) -> list[tuple[int, int]]:
        """The tensors of the value that are tensors of skips, where later stages pop the skip and this one does not.

        Returns:
            Pairs of the number of the tensor and the number of the skip.
        """
        same = self._same.get(micro_batch, ())
        return [(number, n) for number, n in same if self._stage not in self._skips[n].later]

    def entered(
        self, micro_batch: int, leaves: Sequence[Tensor], of_value: Sequence[Tensor], bundle: Bundle
    ) -> tuple[dict[int, Tensor], list[Tensor]]:
        """What the layers get for each popped tensor: an alias; if the value has the same tensor, the value's alias.

        Args:
            micro_batch: its number.
            leaves: the popped tensors.
            of_value: what the layers get as the value.
            bundle: the structure of the inputs.

        Returns:
            The aliases, by the numbers of skips; and the tensors at which gradients from later stages begin.
        """
        number_of = {n: number for number, n in self._same.get(micro_batch, ())}
        aliases = {
            n: of_value[number_of[n]] if n in number_of else boundary.enter(leaf)
            for n, leaf in zip(self._popped(bundle.present), leaves, strict=True)
        }
        begun = [aliases[n] for n in self._continued(list(aliases))]
        return aliases, begun + [of_value[number] for number, _ in self._passed(micro_batch)]

    def tracker(self, aliases: dict[int, Tensor]) -> StageTracker:
        """The tracker for the stage's layers while they run on one micro-batch."""
        popped = {skip.key: aliases.get(n) for n, skip in self._incoming}
        return StageTracker(popped, [skip.key for _, skip in self._outgoing])

    def bundle(
        self, structure: Structure | None, outputs: Sequence[Tensor], tracker: StageTracker
    ) -> tuple[tuple[Tensor, ...], Bundle]:
        """The stashed tensors, and what describes them and the outputs of the layers together."""
        stashed = tracker.outgoing()
        own = {id(output): number for number, output in enumerate(outputs)}
        leaving = [(n, tensor) for (n, _), tensor in zip(self._outgoing, stashed, strict=True)]
        leaving += [(n, tracker.load(skip.key)) for n, skip in self._popped_next]
        same = tuple([(own[id(tensor)], n) for n, tensor in leaving if tensor is not None and id(tensor) in own])
        is_tensor = tuple([tensor is not None for tensor in stashed])
        return tuple([t for t in stashed if t is not None]), Bundle(structure, len(outputs), is_tensor, same)

    def receive_gradients(self, micro_batch: int) -> tuple[Tensor | None, ...]:
        """Waits for gradients from later stages: of what this stage stashes, and of tensors that both use."""
        receivers = self._gradient_receivers
        awaited = [None if n is None else receivers[n](micro_batch)[0][0] for n in self._awaited[micro_batch]]
        return tuple(awaited)

    def send_gradients(self, micro_batch: int, gradients: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
        """Sends the gradients of popped tensors towards the stages that stashed them. Returns those of the value."""
        present, returned = self._present[micro_batch], self._returned[micro_batch]
        with_value = {n for _, n in self._same.get(micro_batch, ())}
        own = len(gradients) - sum(present)
        remaining = iter(gradients[own:])
        for (n, _), send, is_tensor in zip(self._incoming, self._gradient_senders, present, strict=True):
            gradient = next(remaining) if is_tensor else None
            if is_tensor and n not in with_value:
                (self._senders_if_returned[n] if n in returned else send)(micro_batch, ((gradient,), None))
        return gradients[:own]


def _hand_on(
    senders: Sequence[Send], micro_batch: int, tensors: Sequence[Tensor], *, is_returned: bool = False
) -> None:
    """Sends a skip's tensor to other stages, to each as a leaf of its own; no tensors: None was stashed.

    Args:
        senders: to these stages, the first one first.
        micro_batch: its number.
        tensors: one or none.
        is_returned: whether the first stage that pops sends the gradient to `Skip.stage_after_source`.
    """
    for send in senders:
        send(micro_batch, (tuple(map(boundary.cut, tensors)), 1 if is_returned else None))
        is_returned = False


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
