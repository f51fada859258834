"""Separates an attempt of a job from the one before: a prefix for all keys, which the ranks agree on through the store.

A launcher that restarts its processes keeps its store, and with it the addresses and heartbeats of the former ones.
Counts of restarts may differ between machines: on one a process failed, another one was replaced. So every process
writes a random token. Rank 0 lists the tokens of all ranks until each of them has confirmed the list; its own token
then names the attempt.
"""

from __future__ import annotations

import secrets
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

_PAUSE = 0.02  # seconds between two reads


def attempt_prefix(store: Store, rank: int, ranks: int, timeout: float = 300.0) -> str:
    """The prefix for the keys of this attempt; returns as soon as every rank has joined.

    Raises:
        TimeoutError: a rank has not joined in time; rank 0 names those that are missing.
    """
    mine = secrets.token_hex(8)
    store.set(f"pipework/token/{rank}", mine)
    missing: list[int] = []
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        if rank == 0:
            tokens = [mine, *(_value(store, f"pipework/token/{other}") for other in range(1, ranks))]
            store.set("pipework/tokens", " ".join(tokens))
            missing = [n for n, one in enumerate(tokens) if n and not store.check([f"pipework/{mine}/joined/{one}"])]
            if not missing:
                store.set(f"pipework/{mine}/complete", "1")
        else:
            tokens = _value(store, "pipework/tokens").split(" ")
        prefix = f"pipework/{tokens[0]}"
        if len(tokens) == ranks and tokens[rank] == mine:
            store.set(f"{prefix}/joined/{mine}", "1")
            if store.check([f"{prefix}/complete"]):
                return prefix
        time.sleep(_PAUSE)
    others = f"ranks {', '.join(map(str, missing))}" if missing else "other ranks"
    raise TimeoutError(
        f"{others} have not joined within {timeout:.0f} s: check that their processes were started and are still "
        "alive, and that MASTER_ADDR and MASTER_PORT are the same for all"
    )


def _value(store: Store, key: str) -> str:
    """The value of a key, or "-" while it has none."""
    return store.get(key).decode(errors="replace") if store.check([key]) else "-"
