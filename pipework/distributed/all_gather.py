"""All-gather of bytes between the ranks of a group."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from pipework.distributed.transport.channel import LostConnectionError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pipework.distributed.transport.channel import Group


_LENGTH, _DATA = 1, 2  # tags; step headers go through the same group with tag 0


class AllGather:
    """Exchanges bytes between all ranks of a group, one round at a time.

    Args:
        group: of all ranks.
        ranks: their numbers in the job, for messages.
    """

    def __init__(self, group: Group, ranks: Sequence[int]) -> None:
        self._group = group
        self._ranks = ranks

    def gather(self, mine: bytes) -> list[bytes]:
        """The bytes of all ranks, in order. Every rank calls this, and waits here for all others.

        Raises:
            LostConnectionError: a rank is gone.
        """
        here = self._group.rank()
        others = [rank for rank in range(len(self._ranks)) if rank != here]
        length = torch.tensor([len(mine)])
        data = torch.frombuffer(bytearray(mine or b" "), dtype=torch.uint8)
        gathered = {here: mine}
        current = here
        try:
            works = [
                self._group.send([part], other, tag)
                for other in others
                for tag, part in ((_LENGTH, length), (_DATA, data))
            ]
            for current in others:
                size = torch.empty(1, dtype=torch.int64)
                self._group.recv([size], current, _LENGTH).wait()
                buffer = torch.empty(max(1, int(size)), dtype=torch.uint8)
                self._group.recv([buffer], current, _DATA).wait()
                gathered[current] = buffer[: int(size)].numpy().tobytes()
            for work in works:
                work.wait()
        except RuntimeError as error:
            raise LostConnectionError(self._ranks[current]) from error
        return [gathered[rank] for rank in range(len(self._ranks))]
