"""Step headers: at the start of a call the last rank sends the first whether it has a target, the first informs all."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from pipework.backend import StepFacts, StepHeader
from pipework.distributed.transport.channel import LostConnectionError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from pipework.backend import MiniBatch
    from pipework.distributed.transport.channel import Group

_NO_KEY = -1
_GIVEN = -1  # in place of the rows of the mini-batch: the caller has made the micro-batches
_NO_ROWS = -1


class StepHeaders:
    """Exchanges the headers of all calls; this is one rank's side.

    Args:
        group: of the ranks of this pipe.
        ranks: their numbers in the job.
        first: the worker of the first stage.
        last: the worker of the last stage.
    """

    def __init__(self, group: Group, ranks: Sequence[int], first: int, last: int) -> None:
        self._group = group
        self._ranks = ranks
        self._worker = group.rank()
        self._first = first
        self._last = last
        self._calls = 0
        self._sends: list[tuple[Tensor, int, Any]] = []  # sends that have not ended yet, and their memory

    def exchange(self, header: StepHeader, batch: MiniBatch | None, key: int | None, *, inside: bool) -> StepFacts:
        """Gives all ranks the facts of a call that only the first and the last rank know.

        Args:
            header: of this rank.
            batch: on the first rank, the mini-batch.
            key: on the first rank, if it has been drawn.
            inside: on the last rank, whether there is a target.

        Raises:
            ValueError: the ranks make different calls.
            LostConnectionError: a rank is gone.
        """
        self._calls += 1
        for _, worker, work in self._sends:
            self._transfer(worker, work.wait)
        self._sends.clear()
        flags = sum(value << position for position, value in enumerate(header))
        if self._worker == self._last != self._first:
            self._send(self._first, [flags, int(inside), 0, 0, 0])
        if self._worker != self._first:
            theirs, has_target, count, micro_batches, drawn = self._receive(self._first)
            self._check(theirs, flags, self._first)
        else:
            assert batch is not None
            count, micro_batches = _GIVEN if batch.is_given else sum(batch.rows), len(batch.rows)
            drawn = _NO_KEY if key is None else key
            theirs, has_target = flags, int(inside)
            if self._last != self._first:
                theirs, has_target, _, _, _ = self._receive(self._last)
            for worker in range(len(self._ranks)):  # also if headers differ: then every rank raises
                if worker != self._first:
                    self._send(worker, [flags, has_target, count, micro_batches, drawn])
            self._check(theirs, flags, self._last)
        given = self._exchange_rows(batch, micro_batches) if count == _GIVEN else None
        return StepFacts(count, micro_batches, None if drawn == _NO_KEY else drawn, bool(has_target), given)

    def _exchange_rows(self, batch: MiniBatch | None, micro_batches: int) -> Sequence[int]:
        """Gives the last rank the rows of micro-batches that the caller of the first has made; others need none."""
        if batch is not None:
            if self._last != self._first:
                self._send(self._last, batch.rows)
            return batch.rows
        return self._receive(self._first, micro_batches) if self._worker == self._last else [_NO_ROWS] * micro_batches

    def _check(self, theirs: int, mine: int, worker: int) -> None:
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

    def _send(self, worker: int, numbers: Sequence[int]) -> None:
        data = torch.tensor([self._calls, *numbers])
        self._sends.append((data, worker, self._transfer(worker, lambda: self._group.send([data], worker, 0))))

    def _receive(self, worker: int, numbers: int = 5) -> list[int]:
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
