"""How the ranks of an attempt find the same prefix, with threads as ranks."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from torch.distributed import HashStore

from pipework.distributed.store_prefix import attempt_prefix


def prefixes(store: HashStore, ranks: int) -> set[str]:
    with ThreadPoolExecutor(ranks) as pool:
        return set(pool.map(lambda rank: attempt_prefix(store, rank, ranks, timeout=20.0), range(ranks)))


def test_each_attempt_has_one_prefix_of_its_own() -> None:
    store = HashStore()
    found = [prefixes(store, 3) for _ in range(3)]
    assert [len(each) for each in found] == [1, 1, 1]
    assert len(set.union(*found)) == 3


def test_a_rank_that_restarts_alone_is_waited_for() -> None:
    """Rank 1 of the former attempt has left its token; the list changes as soon as the new process writes its own."""
    store = HashStore()
    store.set("pipework/token/1", "of the dead")
    found: list[str] = []
    first = threading.Thread(target=lambda: found.append(attempt_prefix(store, 0, 2, timeout=20.0)))
    first.start()
    time.sleep(0.1)
    assert not found
    found.append(attempt_prefix(store, 1, 2, timeout=20.0))
    first.join(20)
    assert found[0] == found[1]


def test_missing_ranks_are_named() -> None:
    with pytest.raises(TimeoutError, match=r"ranks 1, 2 have not joined within 0 s: check that their processes"):
        attempt_prefix(HashStore(), 0, 3, timeout=0.05)
    with pytest.raises(TimeoutError, match="other ranks have not joined within 0 s"):
        attempt_prefix(HashStore(), 2, 3, timeout=0.05)
