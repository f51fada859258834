"""Words between all ranks of a job: each says something, and each hears what all have said."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from pipework.distributed.transport.channel import LostConnectionError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pipework.distributed.transport.channel import Group


_LENGTH, _WORD = 1, 2  # tags; the group may be used for something else with others


class AllGather:
    """A round of words at a time.

    Args:
        group: of all ranks.
        ranks: their numbers in the job, for messages.
    """

    def __init__(self, group: Group, ranks: Sequence[int]) -> None:
        self._group = group
        self._ranks = ranks

    def all_words(self, mine: bytes) -> list[bytes]:
        """What each rank said, in order; every rank waits here for all others.

        Raises:
            LostConnectionError: one of them is gone.
        """
        here = self._group.rank()
        others = [rank for rank in range(len(self._ranks)) if rank != here]
        length = torch.tensor([len(mine)])
        data = torch.frombuffer(bytearray(mine or b" "), dtype=torch.uint8)
        words = {here: mine}
        current = here
        try:
            works = [
                self._group.send([part], other, tag)
                for other in others
                for tag, part in ((_LENGTH, length), (_WORD, data))
            ]
            for current in others:
                size = torch.empty(1, dtype=torch.int64)
                self._group.recv([size], current, _LENGTH).wait()
                buffer = torch.empty(max(1, int(size)), dtype=torch.uint8)
                self._group.recv([buffer], current, _WORD).wait()
                words[current] = buffer[: int(size)].numpy().tobytes()
            for work in works:
                work.wait()
        except RuntimeError as error:
            raise LostConnectionError(self._ranks[current]) from error
        return [words[rank] for rank in range(len(self._ranks))]
