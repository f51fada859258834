"""Before any work, all ranks compare what they were started with: schedule, chunks, layers, versions.

Each rank publishes one digest of its contract. Only if digests differ do the ranks publish their contracts, compressed
and under their digests, so that ranks with the same contract publish one text.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import time
import zlib
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, Final

from pipework.distributed.health.store_client import StoreClient

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch.distributed.distributed_c10d import Store

_MOST_SENT: Final = 4_000_000  # bytes; a TCPStore takes 8 MB, and closes the connection of a client that sends more
_MOST_READ: Final = 100_000_000  # bytes of JSON, decompressed
_MOST_CONTRACTS: Final = 16  # how many different contracts are compared in an error
_POLL: Final = 0.02  # seconds
_SETTLE: Final = 2.0  # seconds to wait for other ranks once digests differ
_MISSING: Final = object()
_LONGEST: Final = 200  # characters of a value in a message
_DIGEST: Final = re.compile(rb"[0-9a-f]{64}")


def agree(
    store: Store,
    rank: int,
    ranks: int,
    mine: Mapping[str, Any],
    timeout: float,
    names: Callable[[int], str] = "rank {}".format,
    numbers: Sequence[int] | None = None,
) -> None:
    """Returns once all ranks have published equal contracts; raises on every rank if contracts differ.

    Args:
        store: shared by the ranks; no call of it waits for others. Its keys are used once: give each use a prefix.
        rank: this process.
        ranks: how many there are.
        mine: the entries that must be equal on all ranks; anything that JSON can express.
        timeout: seconds to wait for other ranks.
        names: the name of a rank in messages.
        numbers: of the ranks in the job, likewise; None: they are counted from 0.

    Raises:
        ValueError: the contracts differ; the message shows exactly the entries that do.
        TimeoutError: ranks are missing, and the contracts of the others are equal.
        TypeError: JSON cannot express an entry.

    Example:
        >>> from torch.distributed import HashStore
        >>> agree(HashStore(), 0, 1, {"chunks": 8, "schedule": "1f1b"}, timeout=60)
    """
    text = json.dumps(json.loads(json.dumps(mine)), sort_keys=True)  # keys become text before they are sorted
    client = StoreClient(store, own=False)
    begun = time.monotonic()
    digests = _gather_digests(client, rank, ranks, _digest(text), timeout)
    missing = [names(other) for other in range(ranks) if other not in digests]
    absent = f"{', '.join(missing)} did not come within {time.monotonic() - begun:.0f} s"
    if len({*digests.values()}) > 1:
        contracts = _gather_contracts(client, rank, digests, text)
        in_job = numbers or range(ranks)
        lines = _differences({in_job[other]: digest for other, digest in digests.items()}, contracts)
        raise ValueError(
            "the ranks were started with different settings, and must have the same:\n"
            + "\n".join(f"  {line}" for line in lines)
            + (f"\n({absent})" if missing else "")
        )
    if missing:
        raise TimeoutError(f"{absent}; {len(digests)} of {ranks} ranks are there. Look at the logs of the missing ones")


def _gather_digests(client: StoreClient, rank: int, ranks: int, mine: str, timeout: float) -> dict[int, str]:
    """The digests of the ranks that published theirs in time."""
    found = {rank: mine}
    deadline = time.monotonic() + timeout
    client.write(f"digest/{rank}", mine)
    while True:
        for other in range(ranks):
            if other not in found and _DIGEST.fullmatch(raw := client.read(f"digest/{other}") or b""):
                found[other] = raw.decode()
                if found[other] != mine:
                    deadline = min(deadline, time.monotonic() + _SETTLE)
        _keep(client, f"digest/{rank}", mine)
        if len(found) == ranks or time.monotonic() >= deadline:
            return found
        time.sleep(_POLL)


def _gather_contracts(client: StoreClient, rank: int, digests: Mapping[int, str], text: str) -> dict[str, Any]:
    """The contracts by their digests, as far as they were published in time."""
    mine = _digest(text)
    packed = base64.b64encode(zlib.compress(text.encode())).decode()
    found: dict[str, Any] = {mine: json.loads(text)}
    wanted = list(dict.fromkeys(digests[other] for other in sorted(digests)))[:_MOST_CONTRACTS]
    deadline = time.monotonic() + _SETTLE
    while time.monotonic() < deadline:
        if len(packed) <= _MOST_SENT:
            _keep(client, f"contract/{mine}", packed)
        for digest in wanted:
            if digest not in found and (contract := _unpack(client.read(f"contract/{digest}"), digest)) is not None:
                found[digest] = contract
        if found.keys() >= {*wanted}:
            _keep(client, f"read/{rank}", "1")
        # The store may live in this process, which perhaps ends with the error at once: others must have read it.
        if all(client.read(f"read/{other}") is not None for other in digests):
            break
        time.sleep(_POLL)
    return found


def _keep(client: StoreClient, key: str, text: str) -> None:
    """Writes a key unless it is there. Another client than a rank may have overwritten it."""
    if client.read(key) != text.encode():
        client.write(key, text)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _unpack(raw: bytes | None, digest: str) -> Any:
    """The contract that was published; None for anything else that may stand in the store."""
    try:
        text = zlib.decompressobj().decompress(base64.b64decode(raw or b"", validate=True), _MOST_READ).decode()
        contract = json.loads(text) if _digest(text) == digest else None
    except (ValueError, RecursionError, zlib.error):
        return None
    return contract if isinstance(contract, dict) else None


def _differences(digests: Mapping[int, str], contracts: Mapping[str, Any]) -> list[str]:
    """A line for each entry that differs."""
    known = {rank: contracts[digest] for rank, digest in sorted(digests.items()) if digest in contracts}
    lines = []
    for key in sorted({key for contract in known.values() for key in contract}):
        values = {rank: contract.get(key, _MISSING) for rank, contract in known.items()}
        if _differ(values):
            lines.append(_difference(key, values))
    if unknown := [str(rank) for rank in sorted(digests) if rank not in known]:
        lines.append(f"something else, which could not be read, on rank {', '.join(unknown)}")
    return lines


def _difference(key: str, values: Mapping[int, Any]) -> str:
    """A line about an entry that differs. Of long lists and dicts, it shows the first difference alone.

    Example:
        >>> _difference("chunks", {0: 8, 1: 4, 2: 8})
        'chunks: 8 on rank 0, 2; 4 on rank 1'
        >>> _difference("layers", {0: ["Linear", "ReLU"], 1: ["Linear", "GELU"]})
        'layers, first difference at 1: "ReLU" on rank 0; "GELU" on rank 1'
    """
    path, values = _first_difference(values)
    groups = _grouped(values)
    same = next(i for i, letters in enumerate(zip_longest(*groups)) if len(set(letters)) > 1)
    shown = [f"{_short(text, same)} on rank {', '.join(map(str, having))}" for text, having in groups.items()]
    return f"{key}{path and f', first difference at {path}'}: {'; '.join(shown)}"


def _differ(values: Mapping[int, Any]) -> bool:
    """Whether the texts of values do: 1, 1.0 and True are equal. The keys of their dicts are sorted already."""
    return len(set(map(repr, values.values()))) > 1


def _grouped(values: Mapping[int, Any]) -> dict[str, list[int]]:
    """The ranks that have a value, by its text."""
    groups: dict[str, list[int]] = {}
    for rank, value in values.items():
        text = "nothing" if value is _MISSING else json.dumps(value, sort_keys=True)
        groups.setdefault(text, []).append(rank)
    return groups


def _first_difference(values: Mapping[int, Any]) -> tuple[str, Mapping[int, Any]]:
    """The path to the first items that differ, and these items. An empty path: the values are not of one kind."""
    path: list[str] = []
    while True:
        keys: Sequence[Any] = []
        if all(isinstance(value, list) for value in values.values()):
            keys = range(max(map(len, values.values())))
        elif all(isinstance(value, dict) for value in values.values()):
            keys = sorted({key for value in values.values() for key in value})
        items = ((key, {rank: _item(value, key) for rank, value in values.items()}) for key in keys)
        differing = next(((key, each) for key, each in items if _differ(each)), None)
        if differing is None:
            return ".".join(path), values
        path.append(str(differing[0]))
        values = differing[1]


def _item(value: Any, key: Any) -> Any:
    if isinstance(value, list):
        return value[key] if key < len(value) else _MISSING
    return value.get(key, _MISSING)


def _short(text: str, same: int) -> str:
    """Of a long text, the part after its first `same` characters, which others have, too."""
    begin = max(0, same - _LONGEST // 4) if len(text) > _LONGEST else 0
    end = begin + _LONGEST
    return f"{'...' if begin else ''}{text[begin:end]}{'...' if end < len(text) else ''}"
