"""What keeps an attempt of a job apart from the one before: a prefix for all keys, agreed on through the store.

A launcher that restarts its processes keeps its store, and with it the addresses and heartbeats of the dead. Counts of
restarts may differ between machines: some restarted because a process of their own failed, others because a machine
came back. So every process says hello with a word of its own, and the first rank's word names the attempt in which its
list of words has all that are there now.
"""

from __future__ import annotations

import secrets
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

_PAUSE = 0.02  # seconds between two looks


def attempt_prefix(store: Store, rank: int, ranks: int, timeout: float = 300.0) -> str:
    """The prefix for the keys of this attempt; returns as soon as every rank is there.

    Args:
        store: which all ranks share.
        rank: of this process.
        ranks: their number.
        timeout: seconds to wait for the others.

    Raises:
        TimeoutError: not all ranks have come in time; the message names those that have not, as far as it is known.
    """
    mine = secrets.token_hex(8)
    store.set(f"pipework/hello/{rank}", mine)
    deadline = time.monotonic() + timeout
    if rank == 0:
        missing = list(range(1, ranks))
        roster = ""
        while missing:
            words = [mine, *(_value(store, f"pipework/hello/{other}") for other in range(1, ranks))]
            if roster != " ".join(words):
                roster = " ".join(words)
                store.set("pipework/roster", roster)
            missing = [n for n, word in enumerate(words) if n and not store.check([f"pipework/{mine}/here/{word}"])]
            _wait(deadline, timeout, missing)
        store.set(f"pipework/{mine}/whole", "1")
        return f"pipework/{mine}"
    while True:
        words = _value(store, "pipework/roster").split(" ")
        if len(words) == ranks and words[rank] == mine:
            store.set(f"pipework/{words[0]}/here/{mine}", "1")
            if store.check([f"pipework/{words[0]}/whole"]):
                return f"pipework/{words[0]}"
        _wait(deadline, timeout, [])


def _value(store: Store, key: str) -> str:
    """What the store has under a key: a word, or "-" while there is nothing."""
    return store.get(key).decode(errors="replace") if store.check([key]) else "-"


def _wait(deadline: float, timeout: float, missing: list[int]) -> None:
    if time.monotonic() > deadline:
        who = f"ranks {', '.join(map(str, missing))} have" if missing else "the other ranks have"
        raise TimeoutError(
            f"{who} not come within {timeout:.0f} s: see whether their processes were started and are still alive, and "
            "whether MASTER_ADDR and MASTER_PORT are the same for all"
        )
    time.sleep(_PAUSE)
