"""Process groups: gathering bytes, and the end of a group."""

import threading
import time
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed import HashStore

from pipework.distributed.transport.groups import LostConnectionError, all_gather, break_group, group_of
from tests.helpers import in_threads


class _Sent:
    def wait(self) -> None:
        pass


class _Group:
    """Three ranks, of which this is the second; no transfer to or from one of them works.

    Args:
        gone: that rank.
        sends: whether its end is not known yet, so that only receiving fails.
    """

    def __init__(self, gone: int, *, sends: bool) -> None:
        self._gone = gone
        self._sends = sends

    def rank(self) -> int:
        return 1

    def size(self) -> int:
        return 3

    def send(self, tensors: list[Tensor], destination: int, tag: int) -> Any:
        return self._transfer(destination, fails=not self._sends)

    def recv(self, tensors: list[Tensor], source: int, tag: int) -> Any:
        tensors[0].fill_(1)
        return self._transfer(source, fails=True)

    def abort(self) -> None:
        pass

    def _transfer(self, rank: int, *, fails: bool) -> _Sent:
        if fails and rank == self._gone:
            raise RuntimeError("Connection closed by peer")
        return _Sent()


@pytest.mark.parametrize("sends", [False, True])
@pytest.mark.parametrize("gone", [0, 2])
def test_a_lost_rank_is_named(gone: int, sends: bool) -> None:
    with pytest.raises(LostConnectionError) as caught:
        all_gather(_Group(gone, sends=sends), [7, 8, 9], b"text")
    assert caught.value.rank == 7 + gone


@pytest.mark.parametrize("gone", [0, 1])
def test_a_group_of_which_one_has_left_is_broken_all_the_same(gone: int) -> None:
    """Rank 2 waits for one that says nothing, and the other one has closed its connections."""
    store, groups = HashStore(), {}

    def join(rank: int) -> None:
        groups[rank] = group_of(store, "three", (0, 1, 2), rank)

    in_threads(*[lambda rank=rank: join(rank) for rank in range(3)])
    break_group(groups[gone])
    time.sleep(0.2)  # until the others have seen it

    def wait() -> None:
        with pytest.raises(RuntimeError):
            groups[2].recv([torch.empty(1)], 1 - gone, 0).wait()

    timer = threading.Timer(0.3, break_group, (groups[2],))
    timer.start()
    in_threads(wait)
    timer.join()
