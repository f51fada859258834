"""What ranks agree on at the beginning of a call of the pipe: each gives a record of the call, and gets those of all.

The first rank's record has what it read of the inputs, the last one's whether there is a target. The ranks that compute
the same layers together compare their records before. In the first calls, and now and then
later, the records carry digests of inputs and targets, so that ranks that were given different data see it.
"""

from __future__ import annotations

import functools
import json
import math
import struct
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from pipework.backend import StepCall
from pipework.distributed.data_digest import NO_DATA, data_digest, tells_rows
from pipework.distributed.transport.groups import CALL, MOST, begin_exchange, begin_gather
from pipework.model.marks import NO_ROWS
from pipework.model.mini_batch import gradients_are_there
from pipework.spot_checks import is_checked

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pipework.autograd.factor import Factor
    from pipework.distributed.transport.groups import Group
    from pipework.model.mini_batch import MiniBatch

_BYTES: Final = 8 * MOST  # of a record, more than it ever needs
_ALIKE: Final = ("training", "grad", "everywhere", "returns_output", "recorded", "scales_loss")
_CALL_ALIKE: Final = "Call the pipe alike on all ranks"
_SAME_DATA: Final = (
    "All ranks of a pipe, and all that compute the same layers together, take the same mini-batches. A "
    "DistributedSampler gives each rank other rows: take pipe.sampler(dataset), which gives other rows to each replica "
    "of the pipe only; without one, seed the shuffling alike on all ranks"
)

_NO_LOSS, _WAITS, _DELIVERED = "-wd"  # the marks of a call
_CALLS: Final = 32  # that are marked, at most
_CLOSE: Final = 1e-3  # relative difference of factors that two processors computed and may have rounded differently


class Delivered(NamedTuple):
    """What a rank says of its losses.

    Attributes:
        marks: of the latest calls, see `DeliveredLosses`.
        call: of the loss whose factor is told, counted from 1; 0: none is told.
        factor: by which its gradients were multiplied, see `Factor`.
    """

    marks: str = ""
    call: int = 0
    factor: float = 1.0

    def has_other_factor(self, theirs: Delivered) -> bool:
        """Whether two ranks multiplied the gradients of one call by different factors.

        Example:
            >>> Delivered("d", 3, 1.0).has_other_factor(Delivered("d", 3, 0.5))
            True
            >>> Delivered("d", 3, 1.0).has_other_factor(Delivered("d", 2, 0.5))
            False
        """
        one, other = self.factor, theirs.factor
        if not self.call or self.call != theirs.call or (math.isnan(one) and math.isnan(other)):
            return False
        return not math.isclose(one, other, rel_tol=_CLOSE)


class DeliveredLosses:
    """Which losses were brought backward on this rank: a mark for each of the latest calls.

    With the loss inside, `loss.backward()` delivers the gradients of a rank's own layers and asks no other rank. A rank
    that leaves it out would go on without gradients, and one that multiplies the loss by another number than the others
    would get gradients of another scale.

    Example:
        >>> from pipework.autograd.factor import Factor
        >>> here, there = DeliveredLosses(), DeliveredLosses()
        >>> for losses in (here, there):
        ...     losses.begin_call()
        >>> delivered, _ = here.expect(), there.expect()
        >>> delivered(Factor(1.0))
        >>> here.difference(there.marks)
        (1, True)
    """

    def __init__(self) -> None:
        self.marks = ""  # that of the last call is the first
        self._call = 0
        self._latest: tuple[int, Factor] | None = None  # of the last call that was brought backward

    def begin_call(self) -> None:
        """The next call begins; a mark that says nothing is added."""
        self._call += 1
        self.marks = (_NO_LOSS + self.marks)[:_CALLS]

    def expect(self) -> Callable[[Factor], None]:
        """The present call has a loss for this rank's layers. What is returned is to be called at its backward."""
        self.marks = _WAITS + self.marks[1:]
        return functools.partial(self._deliver, self._call)

    def _deliver(self, call: int, factor: Factor) -> None:
        if self._latest is None or call >= self._latest[0]:  # of several backwards of a call the last one counts
            self._latest = call, factor
        age = self._call - call
        if age < len(self.marks):  # else the mark is gone
            self.marks = self.marks[:age] + _DELIVERED + self.marks[age + 1 :]

    def told(self, *, waits: bool) -> Delivered:
        """What this rank tells the others.

        Args:
            waits: whether the host may wait for a factor that an accelerator computes.
        """
        if self._latest is None or not (waits or self._latest[1].is_on_host):
            return Delivered(self.marks)
        return Delivered(self.marks, self._latest[0], self._latest[1].number)

    def difference(self, theirs: str) -> tuple[int, bool] | None:
        """The first call whose loss was brought backward on one of two ranks, and not on the other.

        Args:
            theirs: the marks of the other rank, which has begun as many calls.

        Returns:
            The number of the call, counted from 1, and whether it was on this rank; None: there is no such call.
        """
        different = [
            age
            for age, (here, there) in enumerate(zip(self.marks, theirs, strict=False))
            if here != there and _NO_LOSS not in (here, there)
        ]
        return (self._call - different[-1], self.marks[different[-1]] == _DELIVERED) if different else None


class RankCall(NamedTuple):
    """The record of a call: what a rank says of it.

    Attributes:
        number: of the call.
        call: as the rank makes it.
        losses: of the calls before.
        trained: a digest of which parameters are trained; compared by ranks with the same layers only.
        inputs: a digest of the inputs; `NO_DATA` if there are none, or this call is not checked.
        targets: likewise.
    """

    number: int
    call: StepCall
    losses: Delivered = Delivered()
    trained: int = 0
    inputs: int = NO_DATA
    targets: int = NO_DATA

    def message(self) -> list[int]:
        """The record as whole numbers of 64 bits, always as many. The rows in `given` are another message."""
        given: Sequence[int] | None = None if self.call.given is None else []
        text = json.dumps(self._replace(call=self.call._replace(given=given)))
        return memoryview(text.encode().ljust(_BYTES)).cast("q").tolist()

    @classmethod
    def of_message(cls, numbers: Sequence[int]) -> RankCall:
        """The record that `message` gave.

        Example:
            >>> mine = RankCall(3, StepCall(True, True, False, False, False, rows=8, micro_batches=2, key=5))
            >>> RankCall.of_message(mine.message()) == mine
            True
        """
        number, call, losses, *digests = json.loads(struct.pack(f"={len(numbers)}q", *numbers))
        return cls(number, StepCall(*call), Delivered(*losses), *digests)


@dataclass(eq=False)
class StepCalls:
    """The calls of a pipe, as one rank makes them together with the others.

    Attributes:
        group: of the ranks of this pipe.
        ranks: their numbers in the job.
        first: the worker of the first stage.
        last: the worker of the last stage.
        layers: a group of the ranks that compute the same layers, and their numbers; None: there are no others.
        trained: gives a digest of which parameters are trained.
        losses: which were brought backward here.
    """

    group: Group
    ranks: Sequence[int]
    first: int
    last: int
    layers: tuple[Group, Sequence[int]] | None
    trained: Callable[[], int]
    losses: DeliveredLosses = field(default_factory=DeliveredLosses, init=False)
    _number: int = field(default=0, init=False)

    def own(self, call: StepCall, inputs: Any, target: Any) -> RankCall:
        """The record of this rank for the next call. The caller's thread computes it, whose streams write the data."""
        several = len(self.ranks) > 1 or self.layers is not None
        samples = several and is_checked(self._number)  # reading a sample takes up to 0.1 ms
        self._number += 1
        digests = (data_digest(inputs), data_digest(target)) if samples else (NO_DATA, NO_DATA)
        trained = self.trained() if self.layers is not None else 0
        return RankCall(self._number, call, self.losses.told(waits=samples), trained, *digests)

    def exchange(self, mine: RankCall, batch: MiniBatch | None) -> StepCall:
        """What all ranks know of a call, from what only the first and the last rank know.

        Args:
            mine: the record of this rank.
            batch: on the first rank, the mini-batch.

        Raises:
            ValueError: the ranks make different calls, were given different data, or brought other losses backward.
            LostConnectionError: a rank is gone.
        """
        if self.layers is not None:
            mine = self._agree_on_layers(*self.layers, mine)
        records = _gathered(self.group, mine)
        for name in ("number", *_ALIKE):
            _refuse_difference(name, records, self.ranks)
        for rank, theirs in zip(self.ranks, records, strict=True):
            self.check_delivered(mine.losses, theirs.losses, rank)
        self.losses.begin_call()
        self._check_data(records)
        call, has_target = records[self.first].call, records[self.last].call.has_target
        agreed = call._replace(has_target=has_target, target_is_unread=call.has_target and not has_target)
        if mine.call.layers is not None:
            agreed = agreed._replace(layers=[number for each in records for number in each.call.layers or ()])
        if not gradients_are_there(mine.call.gradients, agreed.gradients):
            raise ValueError(
                f"an input requires a gradient on rank {self.ranks[self.group.rank()]}, which rank "
                f"{self.ranks[self.first]}, that reads the inputs, was given in another shape or without: what comes "
                "before a pipe runs on all ranks alike. Give them the same inputs; where no gradient is wanted, "
                "detach() them or pass None"
            )
        if agreed.given is not None:
            rows = [NO_ROWS] * agreed.micro_batches if batch is None else batch.rows
            agreed = agreed._replace(given=begin_gather(self.group, rows)()[self.first].tolist())
        return agreed

    def _agree_on_layers(self, group: Group, ranks: Sequence[int], mine: RankCall) -> RankCall:
        """This rank's record with the key of the first rank that computes the same layers. All must be alike."""
        everyone = _gathered(group, mine)
        compared = ["number", *_ALIKE, "trained"]
        if self.group.rank() == self.first:
            compared += ["rows", "micro_batches", "inputs", "gradients"]
        if self.group.rank() == self.last:
            compared += ["has_target", "targets"]
        for name in compared:
            _refuse_difference(name, everyone, ranks)
        for rank, theirs in zip(ranks, everyone, strict=True):
            self.check_delivered(mine.losses, theirs.losses, rank)
        return mine._replace(call=mine.call._replace(key=everyone[0].call.key))

    def check_delivered(self, mine: Delivered, theirs: Delivered, rank: int) -> None:
        """Raises a ValueError if another rank brought other losses backward, or with another factor."""
        ranks = self.ranks[self.group.rank()], rank
        if (found := self.losses.difference(theirs.marks)) is not None:
            call, here = found
            one, other = ranks if here else ranks[::-1]
            raise ValueError(
                f"loss.backward() was called on rank {one} and not on rank {other}, after call {call} of the pipe: the "
                f"layers of rank {other} got no gradient. Call it on all ranks: on each it delivers the gradients of "
                "its own layers"
            )
        if mine.has_other_factor(theirs):
            raise ValueError(
                f"the loss of call {mine.call} of the pipe was multiplied by {mine.factor:g} before its backward on "
                f"rank {ranks[0]} and by {theirs.factor:g} on rank {ranks[1]}: each rank multiplies the gradients of "
                "its own layers, so take the same factor on all. A GradScaler that the loop alone knows scales "
                "differently on each rank: give it to Pipe(grad_scaler=)"
            )

    def _check_data(self, records: Sequence[RankCall]) -> None:
        """The inputs of the first rank and the target of the last are read: they must be of one mini-batch.

        They are if both ranks were given the same inputs, or the same target. What else differs is read nowhere, such
        as inputs that the last rank has augmented in another way, or with other rounding. But what comes before the
        pipe on a rank gets the gradient of the first rank's inputs, so that both must have the same.
        """
        ranks = [self.ranks[self.first], self.ranks[self.last]]
        pair = first, last = records[self.first], records[self.last]
        if first.call.gradients and last.call.gradients:
            _refuse_difference("inputs", pair, ranks)
        known = [what for what in ("inputs", "targets") if NO_DATA not in (getattr(first, what), getattr(last, what))]
        if not any(getattr(first, what) == getattr(last, what) and tells_rows(getattr(last, what)) for what in known):
            for what in known:
                _refuse_difference(what, pair, ranks)


def _gathered(group: Group, mine: RankCall) -> list[RankCall]:
    """The records of all ranks of a group."""
    return [RankCall.of_message(numbers) for numbers in begin_exchange(group, CALL, mine.message())().tolist()]


def _refuse_difference(name: str, records: Sequence[RankCall], ranks: Sequence[int]) -> None:
    """Raises a ValueError if not all records have the same value of an attribute; it names the first difference."""
    values = [getattr(each if name in RankCall._fields else each.call, name) for each in records]
    if name in ("inputs", "targets") and NO_DATA in values:
        return
    for rank, value in zip(ranks, values, strict=True):
        if value == values[0]:
            continue
        if name in ("inputs", "targets"):
            text = f"rank {rank} was given other {name} than rank {ranks[0]} in call {records[0].number} of the pipe"
        else:
            text = (
                f"rank {ranks[0]} and rank {rank} call the pipe differently in call {records[0].number}: {name} is "
                f"{values[0]} on rank {ranks[0]} and {value} on rank {rank}"
            )
        same_data = name in ("rows", "micro_batches", "inputs", "targets")
        raise ValueError(f"{text}. {_SAME_DATA if same_data else _CALL_ALIKE}")
