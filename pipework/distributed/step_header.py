"""Step headers: at the start of a call the last rank sends the first whether it has a target, the first informs all.

In the first calls, and now and then later, the headers carry digests of the inputs and targets, so that ranks that were
given different data see it.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch

from pipework.backend import StepFacts, StepHeader
from pipework.distributed.data_digest import NO_DATA, data_digest, tells_rows
from pipework.distributed.delivered_losses import Delivered, DeliveredLosses
from pipework.distributed.layer_group import NO_KEY, LayerCall
from pipework.distributed.transport.channel import LostConnectionError
from pipework.model.marks import NO_ROWS
from pipework.model.mini_batch import gradients_are_there
from pipework.spot_checks import is_checked

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from pipework.backend import StepData
    from pipework.distributed.layer_group import LayerGroup
    from pipework.distributed.transport.channel import Group
    from pipework.model.mini_batch import MiniBatch

_GIVEN: Final = -1  # in place of the rows of the mini-batch: the caller has made the micro-batches


class Numbers(NamedTuple):
    """What a rank says of a call."""

    flags: int
    has_target: int
    marks: int
    factor_call: int = 0
    factor: int = 0  # its 64 bits
    is_unread: int = 0
    rows: int = 0
    micro_batches: int = 0
    key: int = NO_KEY
    inputs: int = NO_DATA
    targets: int = NO_DATA
    gradients: int = 0

    @property
    def delivered(self) -> Delivered:
        """What the rank says of its losses."""
        (factor,) = struct.unpack("<d", struct.pack("<q", self.factor))
        return Delivered(self.marks, self.factor_call, factor)


class StepHeaders:
    """Exchanges the headers of all calls; this is one rank's side.

    Args:
        group: of the ranks of this pipe.
        ranks: their numbers in the job.
        first: the worker of the first stage.
        last: the worker of the last stage.
        layers: the ranks that compute the same layers; None: there are no others.
    """

    def __init__(
        self,
        group: Group,
        ranks: Sequence[int],
        first: int,
        last: int,
        layers: LayerGroup | None = None,
        trained: Callable[[], int] = int,
    ) -> None:
        self._group = group
        self._ranks = ranks
        self._worker = group.rank()
        self._first = first
        self._last = last
        self._layers = layers
        self._trained = trained
        self._calls = 0
        self.losses = DeliveredLosses()
        self._sends: list[tuple[Tensor, int, Any]] = []  # sends that have not ended yet, and their memory

    def own(self, header: StepHeader, data: StepData) -> Numbers:
        """What this rank says of the next call. The caller's thread computes it, whose streams write the data.

        Args:
            header: how this rank makes the call.
            data: what this rank was given; the target of the last rank is the one that counts.
        """
        several = len(self._ranks) > 1 or self._layers is not None
        samples = several and is_checked(self._calls)  # reading a sample takes up to 0.1 ms
        self._calls += 1
        flags = sum(value << position for position, value in enumerate(header))
        marks, call, number = self.losses.told(waits=samples)
        (factor,) = struct.unpack("<q", struct.pack("<d", number))
        numbers = Numbers(flags, int(data.target is not None), marks, call, factor, gradients=data.gradients)
        if not samples:
            return numbers
        return numbers._replace(inputs=data_digest((data.arguments, data.keywords)), targets=data_digest(data.target))

    def exchange(self, header: StepHeader, batch: MiniBatch | None, key: int | None, mine: Numbers) -> StepFacts:
        """Gives all ranks the facts of a call that only the first and the last rank know.

        Args:
            header: of this rank.
            batch: on the first rank, the mini-batch.
            key: on the first rank, if it has been drawn.
            mine: what `own` gave.

        Raises:
            ValueError: the ranks make different calls, were given different data, or brought other losses backward.
            LostConnectionError: a rank is gone.
        """
        for _, worker, work in self._sends:
            self._transfer(worker, work.wait)
        self._sends.clear()
        if self._layers is not None:
            key = self._agree_on_layers(self._layers, batch, key, mine)
        if self._worker == self._last != self._first:
            self._send(self._first, mine)
        if self._worker != self._first:
            theirs = facts = Numbers(*self._receive(self._first))
            other = self._first
        else:
            assert batch is not None
            theirs = mine if self._last == self._first else Numbers(*self._receive(self._last))
            facts = mine._replace(
                has_target=theirs.has_target,
                is_unread=int(mine.has_target and not theirs.has_target),
                rows=sum(batch.rows) if batch.is_cut else _GIVEN,
                micro_batches=len(batch.rows),
                key=NO_KEY if key is None else key,
            )
            for worker in range(len(self._ranks)):  # also if headers differ: then every rank raises
                if worker != self._first:
                    self._send(worker, facts)
            other = self._last
        self._check_flags(theirs.flags, mine.flags, other)
        self.check_delivered(mine.delivered, theirs.delivered, other)
        self.losses.begin_call()
        if mine.has_target and not (facts.has_target or facts.is_unread or (header.training and header.grad)):
            # A training step without a target has an error of its own, and so has a target on the first rank.
            raise ValueError(
                f"a target was given here, and none on rank {self._ranks[self._last]}, which has the last stage and "
                "reads it: give it there"
            )
        if self._worker in (self._first, self._last):
            self._check_data(theirs, mine, other)
        if not gradients_are_there(mine.gradients, facts.gradients):
            raise ValueError(
                f"an input requires a gradient on rank {self._ranks[self._worker]}, which rank "
                f"{self._ranks[self._first]}, that reads the inputs, was given in another shape or without: what comes "
                "before a pipe runs on all ranks alike. Give them the same inputs; where no gradient is wanted, "
                "detach() them or pass None"
            )
        given = self._exchange_rows(batch, facts.micro_batches) if facts.rows == _GIVEN else None
        drawn = None if facts.key == NO_KEY else facts.key
        return StepFacts(
            facts.rows,
            facts.micro_batches,
            drawn,
            bool(facts.has_target),
            given,
            bool(facts.is_unread),
            facts.gradients != 0,
        )

    def _agree_on_layers(
        self, layers: LayerGroup, batch: MiniBatch | None, key: int | None, mine: Numbers
    ) -> int | None:
        """The key of the first of the ranks that compute the same layers. What a rank does not read may differ."""
        reads, compares = self._worker == self._first, self._worker == self._last
        agreed = layers.agree(
            LayerCall(
                self._calls,
                mine.flags,
                mine.marks,
                mine.has_target if compares else 0,
                self._trained(),
                sum(batch.rows) if batch is not None else 0,
                len(batch.rows) if batch is not None else 0,
                mine.inputs if reads else NO_DATA,
                mine.targets if compares else NO_DATA,
                mine.gradients if reads else 0,
                NO_KEY if key is None else key,
            )
        )
        return None if agreed.key == NO_KEY else agreed.key

    def _exchange_rows(self, batch: MiniBatch | None, micro_batches: int) -> Sequence[int]:
        """Gives the last rank the rows of micro-batches that the caller of the first has made; others need none."""
        if batch is not None:
            if self._last != self._first:
                self._send(self._last, batch.rows)
            return batch.rows
        return self._receive(self._first, micro_batches) if self._worker == self._last else [NO_ROWS] * micro_batches

    def _check_flags(self, theirs: int, mine: int, worker: int) -> None:
        if theirs != mine:
            there, here = (
                {name: bool(flags >> n & 1) for n, name in enumerate(StepHeader._fields)} for flags in (theirs, mine)
            )
            differences = ", ".join(
                f"{name} is {here[name]} here and {there[name]} on rank {self._ranks[worker]}"
                for name in StepHeader._fields
                if here[name] != there[name]
            )
            raise ValueError(f"the ranks call the pipe differently: {differences}; call it alike on all of them")

    def check_delivered(self, mine: Delivered, theirs: Delivered, worker: int) -> None:
        """Raises a ValueError if another rank brought other losses backward, or with another factor."""
        ranks = self._ranks[self._worker], self._ranks[worker]
        if (found := self.losses.difference(theirs.marks)) is not None:
            call, here = found
            one, other = ranks if here else ranks[::-1]
            raise ValueError(
                f"loss.backward() was called on rank {one} and not on rank {other}, after call {call} of the pipe: the "
                f"layers of rank {other} got no gradient. Call it on all ranks: on each it delivers the gradients of "
                "its own layers"
            )
        if self.losses.other_factor(mine, theirs):
            raise ValueError(
                f"the loss of call {mine.call} of the pipe was multiplied by {mine.factor:g} before its backward on "
                f"rank {ranks[0]} and by {theirs.factor:g} on rank {ranks[1]}: each rank multiplies the gradients of "
                "its own layers, so take the same factor on all. A GradScaler that the loop alone knows scales "
                "differently on each rank: give it to Pipe(grad_scaler=)"
            )

    def _check_data(self, theirs: Numbers, mine: Numbers, worker: int) -> None:
        """The inputs of the first rank and the target of the last are read: they must be of one mini-batch.

        They are if both ranks were given the same inputs, or the same target. What else differs is read nowhere, such
        as inputs that the last rank has augmented in another way, or with other rounding. But what comes before the
        pipe on a rank gets the gradient of the first rank's inputs, so that both must have the same.
        """
        if mine.gradients and theirs.gradients and mine.inputs != theirs.inputs and NO_DATA not in (
            mine.inputs, theirs.inputs,
        ):  # fmt: skip
            raise ValueError(
                f"rank {self._ranks[self._worker]} was given other inputs than rank {self._ranks[worker]} in call "
                f"{self._calls} of the pipe, and they require a gradient, which is that of rank "
                f"{self._ranks[self._first]}'s: what computed them would train differently on each rank. Give all "
                "ranks the same data, and layers before the pipe the same values and random numbers: "
                "torch.manual_seed(...) with the same number on all ranks, before they are made"
            )
        pairs = {"inputs": (theirs.inputs, mine.inputs), "targets": (theirs.targets, mine.targets)}
        known = {what: pair for what, pair in pairs.items() if NO_DATA not in pair}
        other = [what for what, (there, here) in known.items() if there != here]
        if other and not any(there == here and tells_rows(here) for there, here in known.values()):
            what = other[0]
            raise ValueError(
                f"rank {self._ranks[self._worker]} was given other {what} than rank {self._ranks[worker]} in call "
                f"{self._calls} of the pipe. All ranks of a pipe take the same mini-batch: inputs are read on rank "
                f"{self._ranks[self._first]}, targets on rank {self._ranks[self._last]}, and other ranks may pass "
                "None. A DistributedSampler gives each rank other rows: take pipe.sampler(dataset), which gives "
                "other rows to each replica of the pipe only; without one, seed the shuffling alike on all ranks"
            )

    def _send(self, worker: int, numbers: Sequence[int]) -> None:
        data = torch.tensor([self._calls, *numbers])
        self._sends.append((data, worker, self._transfer(worker, lambda: self._group.send([data], worker, 0))))

    def _receive(self, worker: int, numbers: int = len(Numbers._fields)) -> list[int]:
        data = torch.empty(1 + numbers, dtype=torch.int64)
        self._transfer(worker, lambda: self._group.recv([data], worker, 0).wait())
        calls, *values = data.tolist()
        if calls != self._calls:
            there = f"call {calls} on rank {self._ranks[worker]}"
            raise ValueError(
                f"this is call {self._calls} of the pipe here and {there}: call it equally often everywhere"
            )
        return values

    def _transfer(self, worker: int, transfer: Callable[[], Any]) -> Any:
        try:
            return transfer()
        except RuntimeError as error:
            raise LostConnectionError(self._ranks[worker]) from error
