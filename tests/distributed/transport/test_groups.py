"""Process groups: gathering bytes, and the end of a group."""

import threading
import time

import pytest
import torch
from torch.distributed import HashStore

from pipework.distributed.transport.groups import LostConnectionError, all_gather, break_group, group_of
from tests.helpers import in_threads


def test_texts_of_all_ranks_come_in_order_and_a_lost_rank_is_noticed() -> None:
    store, groups, gathered = HashStore(), {}, {}
    texts = [b"first", b"", "zwölf".encode()]

    def run(rank: int) -> None:
        groups[rank] = group_of(store, "three", (0, 1, 2), rank)
        gathered[rank] = all_gather(groups[rank], texts[rank])
        if rank == 2:
            break_group(groups[2])
        else:
            with pytest.raises(LostConnectionError):
                all_gather(groups[rank], b"text")
            break_group(groups[rank])

    in_threads(*[lambda rank=rank: run(rank) for rank in range(3)])
    assert gathered == dict.fromkeys(range(3), texts)


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
