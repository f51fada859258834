r"""Skip connections between stages: a tensor goes straight from the stage that stashes it to those that pop it.

    stage 0  -- value --> stage 1 -- value --> stage 2        gradients take the same ways back
        \________________ skip ________________/

A stage treats popped tensors as further inputs and stashed tensors as further outputs: they are cut from the graph,
kept for a recomputation, differentiated and freed like the others. `SkipPorts` is an adapter around each function by
which a stage receives, runs and sends:

    receive            1 waits for the popped tensors too, and appends them to the leaves
    run the layers     2 these pop and stash; what they have stashed is appended to the outputs
    send               3 the stashed tensors go their ways, the value goes the usual one
    receive gradients  4 those of stashed tensors are appended, and those of popped ones that later stages pop, too
    send gradients     5 those of the popped tensors go their ways
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from pipework.autograd import boundary
from pipework.runtime.skips import skip_tracker
from pipework.runtime.skips.stashed import Stashed, StashedTensors

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from typing import Any

    from torch import Tensor

    from pipework.autograd.boundary import Root
    from pipework.runtime.skips.skip import Skip
    from pipework.runtime.transport import Endpoint, Message, Receive, Send
    from pipework.values.nested import Structure


class Received(NamedTuple):
    """The structure of a stage's leaves: first those of the value, then the popped ones.

    Attributes:
        value: the structure of the value, which says what earlier stages have stashed of it.
        own: how many leaves belong to the value.
        popped: the numbers of the skips of the others. A tensor of the value that is popped, too, is there once.
        present: the numbers of all skips that the stage pops, without those of which None was stashed.
        returned: those of them whose tensors the source has returned, too.
    """

    value: Stashed
    own: int
    popped: tuple[int, ...]
    present: tuple[int, ...]
    returned: frozenset[int]


class Bundle(NamedTuple):
    """The structure of a stage's outputs: first those of the value, then the stashed ones.

    Attributes:
        value: the structure of the value, with marks for stashed tensors.
        own: how many outputs belong to the value.
        present: for each skip that begins here whether it is a tensor; a layer may stash None.
        same: pairs of the number of a tensor of the value and the number of a skip with the very same tensor.
        begun: where else a backward of this stage starts, with gradients from later stages.
        awaited: the numbers of the skips whose gradients those of the outputs and of `begun` are; None: the gradient of
            the value has that of the skip.
    """

    value: Structure | Stashed | None
    own: int
    present: tuple[bool, ...] = ()
    same: tuple[tuple[int, int], ...] = ()
    begun: tuple[Root, ...] = ()
    awaited: tuple[int | None, ...] = ()


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
        self._incoming = [(n, skip) for n, skip in enumerate(skips) if stage in skip.later]
        self._outgoing = [(n, skip) for n, skip in enumerate(skips) if stage == skip.source and skip.later]
        self._popped_next = [(n, skip) for n, skip in self._incoming if stage + 1 in skip.later]
        self.any_gradients = any(stage in (skip.source, *skip.destinations, skip.stage_after_source) for skip in skips)
        self._received: dict[int, Received] = {}  # by micro-batch, as the next
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
        self._gradient_senders: dict[int, Send] = {
            n: endpoint.sender(f"B skip {n}", skip.gradient_to(self._stage)) for n, skip in self._incoming
        }
        self._senders_if_returned: dict[int, Send] = {
            n: endpoint.sender(f"B skip {n}", skip.stage_after_source)
            for n, skip in self._incoming
            if skip.stage_after_source is not None and skip.later[0] == self._stage
        }

    def receive(self, receive: Receive, micro_batch: int) -> Message:
        """1: the leaves of the value and of what the stage pops, which is handed on to later stages."""
        leaves, structure = receive(micro_batch)
        value = structure if isinstance(structure, Stashed) else Stashed(structure)
        with_value = {n for _, n in value.same}
        tensors: list[Tensor] = []
        popped, present, returned = [], [], []
        for (n, _), receive_skip, senders in zip(self._incoming, self._receivers, self._senders_on, strict=True):
            own, is_returned = receive_skip(micro_batch)
            _hand_on(senders, micro_batch, own)
            if own:
                present.append(n)
                if n not in with_value:
                    tensors += own
                    popped.append(n)
            if is_returned:
                returned.append(n)
        received = Received(value, len(leaves), tuple(popped), tuple(present), frozenset(returned))
        self._received[micro_batch] = received
        return leaves + tuple(tensors), received

    def run(
        self,
        layers: Callable[[tuple[Tensor, ...], Any, int], tuple[tuple[Tensor, ...], Any]],
        leaves: tuple[Tensor, ...],
        received: Received,
        micro_batch: int,
    ) -> tuple[tuple[Tensor, ...], Bundle]:
        """2: runs the layers while they may stash and pop."""
        value = leaves[: received.own]
        number_of, others = {n: number for number, n in received.value.same}, iter(leaves[received.own :])
        tensors = {n: value[number_of[n]] if n in number_of else next(others) for n in received.present}
        arrived = self._stashed.arrived(value, received.value, tensors)
        tracker = skip_tracker.LocalTracker({skip.key: tensors.get(n) for n, skip in self._incoming})
        with skip_tracker.using(tracker):
            outputs, structure = layers(value, received.value.structure, micro_batch)
        self._stashed.refuse_overwritten(arrived)
        stashed = [(n, tracker.load(skip.key)) for n, skip in self._outgoing]
        own = {id(output): number for number, output in enumerate(outputs)}
        leaving = [*stashed, *((n, tracker.load(skip.key)) for n, skip in self._popped_next)]
        same = [(own[id(tensor)], n) for n, tensor in leaving if tensor is not None and id(tensor) in own]
        present = [(n, tensor) for n, tensor in stashed if tensor is not None]
        # A gradient from later stages begins at what they pop, too, and at what only passes through this stage.
        continued = [n for n in tensors if self._stage < self._skips[n].later[-1]]
        passed = [(number, n) for number, n in received.value.same if self._stage not in self._skips[n].later]
        begun = [*(tensors[n] for n in continued), *(value[number] for number, _ in passed)]
        # If the stage has returned a skip's tensor, the gradient of the value contains that of the skip.
        with_value = {n for _, n in same}
        awaited = [None if n in with_value else n for n in [*(n for n, _ in present), *continued]]
        bundle = Bundle(
            self._stashed.marking(structure, outputs, arrived, present, tuple(same)),
            len(outputs),
            tuple([tensor is not None for _, tensor in stashed]),
            tuple(same),
            tuple(map(boundary.edge, begun)),
            (*awaited, *(n for _, n in passed)),
        )
        return outputs + tuple([tensor for _, tensor in present]), bundle

    def send(self, send: Send, micro_batch: int, message: Message) -> None:
        """3: sends the stashed tensors on their ways to the stages that pop them, and the value."""
        outputs, bundle = message
        remaining, returned = iter(outputs[bundle.own :]), {n for _, n in bundle.same}
        for (n, skip), senders, is_tensor in zip(self._outgoing, self._senders, bundle.present, strict=True):
            own = (next(remaining),) if is_tensor else ()
            _hand_on(senders, micro_batch, own, is_returned=n in returned and skip.stage_after_source is not None)
        self._awaited[micro_batch] = bundle.awaited
        send(micro_batch, (outputs[: bundle.own], bundle.value))

    def awaits(self, name: str, micro_batch: int) -> bool | None:
        """Whether a message of this name will come; None: it is known only after the forward."""
        if not name.startswith("B skip "):
            return True
        if micro_batch not in self._awaited:
            return None
        return int(name.removeprefix("B skip ")) in self._awaited[micro_batch]

    def receive_gradients(self, receive: Receive, micro_batch: int) -> Message:
        """4: the gradients of the value, of what this stage stashes, and of tensors that later stages use, too."""
        gradients, structure = receive(micro_batch)
        receivers = self._gradient_receivers
        awaited = [None if n is None else receivers[n](micro_batch)[0][0] for n in self._awaited[micro_batch]]
        return gradients + tuple(awaited), structure

    def send_gradients(self, send: Send | None, micro_batch: int, message: Message) -> None:
        """5: sends the gradients of popped tensors towards the stages that stashed them, and those of the value."""
        gradients, structure = message
        received = self._received[micro_batch]
        for n, gradient in zip(received.popped, gradients[received.own :], strict=True):
            senders = self._senders_if_returned if n in received.returned else self._gradient_senders
            senders[n](micro_batch, ((gradient,), None))
        if send is not None:
            send(micro_batch, (gradients[: received.own], structure))


def _hand_on(
    senders: Iterable[Send], micro_batch: int, tensors: Sequence[Tensor], *, is_returned: bool = False
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
