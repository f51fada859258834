"""Long lists and dicts in parts with a digest each: comparing the digests tells which part is worth being sent.

A part has so many items, lists by number and dicts by sorted key. Where two values differ, all parts before the first
difference are the same in both, and it lies in the first part that is not.
"""

from __future__ import annotations

import hashlib
import json
import operator
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

PART: Final = 256  # items

Pairs = list[list[Any]]
"""Keys, or numbers, and values of a part."""


def part(value: list[Any] | dict[str, Any], number: int) -> Pairs:
    """The items of one part; nothing behind the end.

    Example:
        >>> part(["a", "b"], 0), part({"y": 1, "x": 2}, 0), part(["a", "b"], 1)
        ([[0, 'a'], [1, 'b']], [['x', 2], ['y', 1]], [])
    """
    return _pairs(value)[number * PART : (number + 1) * PART]


def digests(value: list[Any] | dict[str, Any]) -> list[str]:
    """The digest of each part.

    Example:
        >>> one, two = digests(list(range(1000))), digests([*range(999), 0])
        >>> [a == b for a, b in zip(one, two, strict=True)]
        [True, True, True, False]
    """
    pairs = _pairs(value)
    return [digest(pairs[cut : cut + PART]) for cut in range(0, len(pairs), PART)]


def digest(pairs: Pairs) -> str:
    """Of one part."""
    return hashlib.sha256(json.dumps(pairs, sort_keys=True).encode()).hexdigest()[:16]


def first_difference(every: Iterable[Sequence[str]]) -> int:
    """The number of the first part that is not the same everywhere.

    Example:
        >>> first_difference([["a", "b", "c"], ["a", "x"], ["a", "b", "c"]])
        1
    """
    columns = enumerate(zip_longest(*every))
    return next((number for number, column in columns if len(set(column)) > 1), 0)


def _pairs(value: list[Any] | dict[str, Any]) -> Pairs:
    items = enumerate(value) if isinstance(value, list) else sorted(value.items(), key=operator.itemgetter(0))
    return [[key, item] for key, item in items]
