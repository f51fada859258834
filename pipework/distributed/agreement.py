"""Before any work, all ranks compare what they were started with: schedule, chunks, layers, versions.

What is short is exchanged as it is. Of long lists and dicts, such as the forms of a hundred thousand parameters, ranks
exchange the digests of their parts, and only where these differ, in a second round, the first part that does.
"""

from __future__ import annotations

import json
import time
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from pipework.distributed.health.store_client import StoreClient
from pipework.distributed.parts import PART, digest, digests, first_difference, part

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from torch.distributed.distributed_c10d import Store

    from pipework.distributed.parts import Pairs

_LIMIT: Final = 4_000_000  # bytes; a TCPStore takes 8 MB, and breaks the connection of who sends more
_POLL: Final = 0.02
_SETTLE: Final = 2.0  # seconds: once there is a difference, nobody waits longer for who has not come yet
_MISSING: Final = object()
_UNTOLD: Final = object()
_LONG: Final = 2000  # characters of a list or dict that is compared by digests
_LONGEST: Final = 200  # characters of a value in a message


def agree(
    store: Store,
    rank: int,
    ranks: int,
    mine: Mapping[str, Any],
    timeout: float,
    names: Callable[[int], str] = "rank {}".format,
) -> None:
    """Returns once all ranks have come with the same entries; raises on every rank if they differ.

    Args:
        store: through which ranks talk; no call of it waits for others. Its keys are used once: give each use a prefix
            of its own.
        rank: this process.
        ranks: how many there are.
        mine: what must be the same on all of them; anything that JSON can express.
        timeout: seconds that other ranks may take to come.
        names: what a rank is called in messages.

    Raises:
        ValueError: the ranks differ; the message shows exactly the entries that do.
        TimeoutError: some ranks did not come, and those that came agree.
        TypeError: JSON cannot express an entry.

    Example:
        >>> from torch.distributed import HashStore
        >>> agree(HashStore(), 0, 1, {"chunks": 8, "schedule": "1f1b"}, timeout=60)
    """
    mine = json.loads(json.dumps(mine))  # as the others will read it
    parts = {key: digests(value) for key, value in mine.items() if _is_long(value)}
    short = {key: value for key, value in mine.items() if key not in parts}
    text = json.dumps({"short": short, "parts": parts}, sort_keys=True)
    if len(text) > _LIMIT:
        raise ValueError(
            f"what ranks agree on must fit into {_LIMIT} bytes of JSON, got {len(text)}: send a digest of what is long"
        )
    client = StoreClient(store, own=False)
    client.write(f"entries/{rank}", text)
    entries = {rank: _Entries(**json.loads(text))}
    begun = time.monotonic()
    deadline = begun + timeout
    while len(entries) < ranks and time.monotonic() < deadline:
        came = False
        for other in range(ranks):
            if other not in entries and (found := _read_entries(client.read(f"entries/{other}"))) is not None:
                entries[other] = found
                came = True
        if came:
            if len(entries) < ranks and _differing(entries):
                deadline = min(deadline, time.monotonic() + _SETTLE)
            continue
        _keep(client, f"entries/{rank}", text)
        time.sleep(_POLL)
    differing = _differing(entries)
    if len(entries) == ranks:
        _let_others_read(client, rank, range(ranks), "entries", text)
        if not differing:
            return
    missing = [names(other) for other in range(ranks) if other not in entries]
    absent = f"{', '.join(missing)} did not come within {time.monotonic() - begun:.0f} s"
    if differing:
        also = f"\n({absent})" if missing else ""
        compared = list(_compared(client, rank, mine, differing, entries))
        raise ValueError(
            "the ranks were started with different settings, and must have the same:\n"
            + "\n".join(f"  {_difference(key, values)}" for key, values in compared)
            + also
        )
    raise TimeoutError(f"{absent}; {len(entries)} of {ranks} ranks are there. Look at the logs of those that are not")


class _Entries(NamedTuple):
    """What a rank has told.

    Attributes:
        short: entries as they are.
        parts: of the others, the digests of their parts.
    """

    short: Mapping[str, Any]
    parts: Mapping[str, list[str]]

    def of(self, key: str) -> Any:
        """What can be compared."""
        return self.parts[key] if key in self.parts else self.short.get(key, _MISSING)

    def digests(self, key: str) -> list[str] | None:
        """Of the parts of an entry, also of a short one; None: it has no parts."""
        value = self.of(key)
        return value if key in self.parts else digests(value) if isinstance(value, (list, dict)) else None


def _is_long(value: Any) -> bool:
    return isinstance(value, (list, dict)) and (len(value) > PART or len(json.dumps(value)) > _LONG)


def _differing(entries: Mapping[int, _Entries]) -> list[str]:
    """The keys of entries that are not the same everywhere."""
    keys = sorted({key for each in entries.values() for key in (*each.short, *each.parts)})
    return [key for key in keys if len(_grouped({rank: each.of(key) for rank, each in entries.items()})) > 1]


def _compared(
    client: StoreClient,
    rank: int,
    mine: Mapping[str, Any],
    differing: Sequence[str],
    entries: Mapping[int, _Entries],
) -> Iterator[tuple[str, dict[int, Any]]]:
    """Each entry that differs, and what it is on each rank; of long ones, the first part that differs."""
    numbers = {
        key: first_difference([own for each in entries.values() if (own := each.digests(key)) is not None])
        for key in differing
        if any(key in each.parts for each in entries.values())
    }
    told = _exchange_parts(client, rank, mine, numbers, entries) if numbers else {}
    for key in differing:
        values = {other: each.of(key) for other, each in entries.items()}
        if key in numbers:
            for other, each in entries.items():
                if key in each.parts:
                    values[other] = dict(told[other][key]) if other in told else _UNTOLD
                elif isinstance(values[other], (list, dict)):
                    values[other] = dict(part(values[other], numbers[key]))
        yield key, values


def _exchange_parts(
    client: StoreClient,
    rank: int,
    mine: Mapping[str, Any],
    numbers: Mapping[str, int],
    entries: Mapping[int, _Entries],
) -> dict[int, Mapping[str, Pairs]]:
    """The second round: the parts with these numbers, of the ranks that tell them in time."""
    text = json.dumps({key: part(mine[key], number) for key, number in numbers.items() if key in entries[rank].parts})
    if len(text) > _LIMIT:  # which breaks the connection of who writes it
        text = "{}"
    client.write(f"parts/{rank}", text)
    found: dict[int, Mapping[str, Pairs]] = {}
    deadline = time.monotonic() + _SETTLE
    while len(found) < len(entries) and time.monotonic() < deadline:
        for other in entries.keys() - found.keys():
            content = _read(client.read(f"parts/{other}"))
            announced = {key: each[numbers[key] :][:1] for key, each in entries[other].parts.items() if key in numbers}
            if content is not None and all(_are_parts(content.get(key), each) for key, each in announced.items()):
                found[other] = content
        _keep(client, f"parts/{rank}", text)
        time.sleep(_POLL)
    _let_others_read(client, rank, entries, "parts", text)
    return found


def _are_parts(told: Any, announced: Sequence[str]) -> bool:
    """Whether it is what the rank has announced the digest of; nothing, behind the end."""
    return told == [] if not announced else isinstance(told, list) and digest(told) == announced[0]


def _let_others_read(client: StoreClient, rank: int, ranks: Iterable[int], what: str, text: str) -> None:
    """The store may live in this process, which perhaps ends with an error at once: the others read before."""
    client.write(f"read {what}/{rank}", "1")
    deadline = time.monotonic() + _SETTLE
    while any(client.read(f"read {what}/{other}") is None for other in ranks) and time.monotonic() < deadline:
        _keep(client, f"{what}/{rank}", text)
        time.sleep(_POLL)


def _keep(client: StoreClient, key: str, text: str) -> None:
    """Writes once more what somebody who is no rank has overwritten."""
    if client.read(key) != text.encode():
        client.write(key, text)


def _read(raw: bytes | None) -> Mapping[str, Any] | None:
    """What a rank wrote; None for anything else that may stand in the store."""
    if raw is None or len(raw) > _LIMIT:
        return None
    try:
        content = json.loads(raw)
    except (ValueError, RecursionError):
        return None
    return content if isinstance(content, dict) else None


def _read_entries(raw: bytes | None) -> _Entries | None:
    match _read(raw):
        case {"short": dict(short), "parts": dict(parts)}:
            if all(isinstance(each, list) and all(isinstance(one, str) for one in each) for each in parts.values()):
                return _Entries(short, parts)
    return None


def _difference(key: str, values: Mapping[int, Any]) -> str:
    """A line about an entry that is not the same everywhere.

    Example:
        >>> _difference("chunks", {0: 8, 1: 4, 2: 8})
        'chunks: 8 on rank 0, 2; 4 on rank 1'
        >>> _difference("layers", {0: ["Linear", "ReLU"], 1: ["Linear", "GELU"]})
        'layers, first difference at 1: "ReLU" on rank 0; "GELU" on rank 1'
    """
    place, values = _narrowed(values)
    groups = _grouped(values)
    same = next(i for i, letters in enumerate(zip_longest(*groups)) if len(set(letters)) > 1)
    shown = [f"{_short(text, same)} on rank {', '.join(map(str, having))}" for text, having in groups.items()]
    return f"{key}{place}: {'; '.join(shown)}"


def _grouped(values: Mapping[int, Any]) -> dict[str, list[int]]:
    """Which ranks have a value, by its text; in the order of the ranks."""
    words = {id(_MISSING): "nothing", id(_UNTOLD): "something else"}
    groups: dict[str, list[int]] = {}
    for rank in sorted(values):
        value = values[rank]
        text = words.get(id(value)) or json.dumps(value, sort_keys=True)
        groups.setdefault(text, []).append(rank)
    return groups


def _narrowed(values: Mapping[int, Any]) -> tuple[str, Mapping[int, Any]]:
    """Of long values of the same kind, only the first part that differs."""
    place = ""
    while True:
        known = {rank: value for rank, value in values.items() if value is not _UNTOLD}
        keys: Sequence[Any]
        if all(isinstance(value, list) for value in known.values()):
            keys = range(max(map(len, known.values()), default=0))
        elif all(isinstance(value, dict) for value in known.values()):
            # Numbers and names: a list may stand where another rank has a dict.
            keys = sorted({key for value in known.values() for key in value}, key=lambda key: (type(key) is str, key))
        else:
            return (f", first difference at {place}" if place else ""), values
        for key in keys:
            if len(_grouped({rank: _part(value, key) for rank, value in known.items()})) > 1:
                values = {rank: _part(value, key) if rank in known else value for rank, value in values.items()}
                place = f"{place}.{key}" if place else str(key)
                break
        else:  # they differ in what JSON does not show, or in what was not told
            return (f", first difference at {place}" if place else ""), values


def _part(value: Any, key: Any) -> Any:
    if isinstance(value, list):
        return value[key] if key < len(value) else _MISSING
    return value.get(key, _MISSING)


def _short(text: str, same: int) -> str:
    """Of a long text, what follows its first `same` characters, which others have, too."""
    if len(text) <= _LONGEST:
        return text
    begin = max(0, same - _LONGEST // 4)
    end = begin + _LONGEST
    return f"{'...' if begin else ''}{text[begin:end]}{'...' if end < len(text) else ''}"
