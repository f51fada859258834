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

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence

    from torch import Tensor

    from pipework.runtime.skips.skip import Skip
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
    """Sends and receives the skips of one stage.

    Args:
        stage: its number.
        skips: all of the pipe.
    """

    def __init__(self, stage: int, skips: Sequence[Skip]) -> None:
        self._stage = stage
        self._count = len(skips)
        numbered = list(enumerate(skips))
        self._incoming = [(n, skip) for n, skip in numbered if stage in skip.later]
        self._outgoing = [(n, skip) for n, skip in numbered if stage == skip.source and skip.later]
        self._popped_next = [(n, skip) for n, skip in self._incoming if stage + 1 in skip.later]
        # Of those that later stages pop, too: the place among the incoming ones, and the number.
        self._continued = [(at, n) for at, (n, skip) in enumerate(self._incoming) if stage < skip.later[-1]]
        self.may_be_passed = any(stage == skip.behind for skip in skips)
        self.touched = any(stage == skip.source or stage in skip.destinations for skip in skips)
        self._present_in: dict[int, tuple[bool, ...]] = {}
        self._same: dict[int, tuple[tuple[int, int], ...]] = {}
        self._behind: dict[int, frozenset[int]] = {}  # the popped skips whose gradients go behind the source
        self._awaited: dict[int, tuple[int | None, ...]] = {}

    def connect(self, endpoint: Endpoint) -> None:
        """Prepares for one run of the worker."""
        self._receivers = [endpoint.receiver(f"F skip {n}", self._stage) for n, _ in self._incoming]
        self._gradient_receivers = [endpoint.receiver(f"B skip {n}", self._stage) for n in range(self._count)]

        def senders(n: int, skip: Skip) -> list[Send]:
            to = [each for each in skip.later if skip.value_from(each) == self._stage]
            return [endpoint.sender(f"F skip {n}", stage) for stage in to]

        self._senders = [senders(n, skip) for n, skip in self._outgoing]
        self._senders_on = [senders(n, skip) for n, skip in self._incoming]
        self._gradient_senders: list[Send] = [
            endpoint.sender(f"B skip {n}", skip.gradient_to(self._stage)) for n, skip in self._incoming
        ]
        self._senders_behind: dict[int, Send] = {
            n: endpoint.sender(f"B skip {n}", skip.behind)
            for n, skip in self._incoming
            if skip.behind is not None and skip.later[0] == self._stage
        }

    def receive(
        self, micro_batch: int, leaves: tuple[Tensor, ...], structure: Structure | None
    ) -> tuple[tuple[Tensor, ...], Bundle]:
        """Waits for the tensors that the stage pops, hands them on, and appends them to its inputs."""
        skips: list[Tensor] = []
        present, behind = [], []
        for (n, _), receive, senders in zip(self._incoming, self._receivers, self._senders_on, strict=True):
            tensors, is_behind = receive(micro_batch)
            _hand_on(senders, micro_batch, tensors)
            skips += tensors
            present.append(bool(tensors))
            if is_behind:
                behind.append(n)
        self._present_in[micro_batch], self._behind[micro_batch] = tuple(present), frozenset(behind)
        return leaves + tuple(skips), Bundle(structure, len(leaves), tuple(present))

    def send(self, micro_batch: int, tensors: Sequence[Tensor], bundle: Bundle) -> None:
        """Sends the stashed tensors on their ways to the stages that pop them."""
        remaining = iter(tensors)
        returned = {n for _, n in bundle.same}
        awaited = []
        for (n, skip), senders, is_tensor in zip(self._outgoing, self._senders, bundle.present, strict=True):
            is_behind = n in returned and skip.behind is not None
            _hand_on(senders, micro_batch, (next(remaining),) if is_tensor else (), is_behind=is_behind)
            if is_tensor:
                awaited.append(n)
        if self._continued:
            present = self._present_in[micro_batch]
            awaited += [n for at, n in self._continued if present[at]]
        self.await_gradients(micro_batch, [None if n in returned else n for n in awaited] if returned else awaited)

    def await_gradients(self, micro_batch: int, own: Sequence[int | None] = ()) -> None:
        """After a forward: notes which gradients will come.

        Args:
            micro_batch: its number.
            own: the skips that the stage has stashed, then those of `continued`. None: the gradient is a part of that
                of the value that the stage has returned.
        """
        self._awaited[micro_batch] = (*own, *[n for _, n in self.passed(micro_batch)]) if self._same else tuple(own)

    def awaits(self, name: str, micro_batch: int) -> bool | None:
        """Whether a message of this name will come; None: it is known only after the forward."""
        if not name.startswith("B skip "):
            return True
        if micro_batch not in self._awaited:
            return None
        n = int(name.removeprefix("B skip "))
        return n in self._awaited[micro_batch]

    def note_same(self, micro_batch: int, same: tuple[tuple[int, int], ...]) -> None:
        """Notes which tensors of the value that has come are the tensors of skips."""
        self._same[micro_batch] = same

    def passed(self, micro_batch: int) -> list[tuple[int, int]]:
        """Those of them that this stage does not pop, but later ones do."""
        if micro_batch not in self._same:
            return []
        popped = [n for n, _ in self._incoming]
        return [(number, n) for number, n in self._same[micro_batch] if n not in popped]

    def entered(
        self, micro_batch: int, leaves: Sequence[Tensor], aliases: Sequence[Tensor], present: tuple[bool, ...]
    ) -> list[Tensor]:
        """For each popped tensor what the layers get: that of the value if it is the same, else an alias.

        Args:
            micro_batch: its number.
            leaves: the popped ones.
            aliases: what the layers get as the value.
            present: see `Bundle`.
        """
        if micro_batch not in self._same:
            return list(map(boundary.enter, leaves))
        number_of = {n: number for number, n in self._same[micro_batch]}
        return [
            aliases[number_of[n]] if n in number_of else boundary.enter(leaf)
            for n, leaf in zip(self.popped(present), leaves, strict=True)
        ]

    def bundle(
        self, structure: Structure | None, outputs: Sequence[Tensor], tracker: StageTracker
    ) -> tuple[tuple[Tensor, ...], Bundle]:
        """The stashed tensors, and what describes them and the outputs of the layers together."""
        if not (self._outgoing or self._popped_next):
            return (), Bundle(structure, len(outputs), ())
        stashed = tracker.outgoing()
        own = {id(output): number for number, output in enumerate(outputs)}
        leaving = [(n, tensor) for (n, _), tensor in zip(self._outgoing, stashed, strict=True)]
        leaving += [(n, tracker.load(skip.key)) for n, skip in self._popped_next]
        same = tuple([(own[id(tensor)], n) for n, tensor in leaving if tensor is not None and id(tensor) in own])
        is_tensor = tuple([tensor is not None for tensor in stashed])
        return tuple([t for t in stashed if t is not None]), Bundle(structure, len(outputs), is_tensor, same)

    def stashed(self, tensors: Sequence[Tensor], present: tuple[bool, ...]) -> list[tuple[int, Tensor]]:
        """The stashed tensors, each with the number of its skip."""
        numbers = [n for (n, _), is_tensor in zip(self._outgoing, present, strict=True) if is_tensor]
        return list(zip(numbers, tensors, strict=True))

    def popped(self, present: tuple[bool, ...]) -> list[int]:
        """The numbers of the skips of the popped tensors."""
        return [n for (n, _), is_tensor in zip(self._incoming, present, strict=True) if is_tensor]

    def continued(self, aliases: Sequence[Tensor], present: tuple[bool, ...]) -> list[Tensor]:
        """The aliases of popped tensors that later stages pop, too."""
        if not self._continued:
            return []
        remaining = iter(aliases)
        tensors = [next(remaining) if is_tensor else None for is_tensor in present]
        return [tensor for at, _ in self._continued if (tensor := tensors[at]) is not None]

    def receive_gradients(self, micro_batch: int) -> tuple[Tensor | None, ...]:
        """Waits for the sums over later stages.

        Returns:
            The gradients of stashed tensors, of `continued`, and of `passed`.
        """
        return tuple([None if n is None else self._gradient(n, micro_batch) for n in self._awaited[micro_batch]])

    def _gradient(self, n: int, micro_batch: int) -> Tensor | None:
        (gradient,), _ = self._gradient_receivers[n](micro_batch)
        return gradient  # type: ignore[no-any-return]

    def send_gradients(self, micro_batch: int, gradients: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
        """Sends the gradients of popped tensors towards the stages that stashed them. Returns those of the value."""
        present, behind = self._present_in[micro_batch], self._behind[micro_batch]
        with_value = {n for _, n in self._same[micro_batch]} if micro_batch in self._same else ()
        own = len(gradients) - sum(present)
        remaining = iter(gradients[own:])
        for (n, _), send, is_tensor in zip(self._incoming, self._gradient_senders, present, strict=True):
            gradient = next(remaining) if is_tensor else None
            if is_tensor and n not in with_value:
                (self._senders_behind[n] if n in behind else send)(micro_batch, ((gradient,), None))
        return gradients[:own]

    def tracker(self, aliases: Sequence[Tensor], present: tuple[bool, ...]) -> StageTracker:
        """The tracker for the stage's layers while they run on one micro-batch."""
        remaining = iter(aliases)
        popped = {
            skip.key: next(remaining) if is_tensor else None
            for (_, skip), is_tensor in zip(self._incoming, present, strict=True)
        }
        return StageTracker(popped, [skip.key for _, skip in self._outgoing])


def _hand_on(senders: Sequence[Send], micro_batch: int, tensors: Sequence[Tensor], *, is_behind: bool = False) -> None:
    """Sends a skip's tensor to other stages, to each as a leaf of its own; no tensors: None was stashed.

    Args:
        senders: to these stages, the first one first.
        micro_batch: its number.
        tensors: one or none.
        is_behind: whether the first stage that pops hands the gradient to `Skip.behind`.
    """
    for send in senders:
        send(micro_batch, (tuple(map(boundary.cut, tensors)), 1 if is_behind else None))
        is_behind = False


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
