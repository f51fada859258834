"""All-gather of bytes between the ranks of a group."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from pipework.distributed.transport.channel import LostConnectionError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pipework.distributed.transport.channel import Group


_LENGTH, _DATA = 1, 2  # tags; step headers go through the same group with tag 0


def all_gather(group: Group, ranks: Sequence[int], mine: bytes) -> list[bytes]:
    """The bytes of all ranks of a group, in order. Every rank calls this, and waits here for all others.

    Raises:
        LostConnectionError: a rank is gone; it has its number in the job, one of `ranks`.
    """
    here = group.rank()
    others = [rank for rank in range(len(ranks)) if rank != here]
    length = torch.tensor([len(mine)])
    data = torch.frombuffer(bytearray(mine or b" "), dtype=torch.uint8)
    gathered = {here: mine}
    current = here
    try:
        sent = []
        for current in others:  # a send to a rank that is known to be gone raises at once
            sent += [(current, group.send([part], current, tag)) for tag, part in ((_LENGTH, length), (_DATA, data))]
        for current in others:
            size = torch.empty(1, dtype=torch.int64)
            group.recv([size], current, _LENGTH).wait()
            buffer = torch.empty(max(1, int(size)), dtype=torch.uint8)
            group.recv([buffer], current, _DATA).wait()
            gathered[current] = buffer[: int(size)].numpy().tobytes()
        for receiver, work in sent:
            current = receiver
            work.wait()
    except RuntimeError as error:
        raise LostConnectionError(ranks[current]) from error
    return [gathered[rank] for rank in range(len(ranks))]
