"""The function of `split=`, by which a user cuts a mini-batch that cannot be cut along the rows of its tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from pipework.model.given import MicroBatches
from pipework.runtime.failure import add_note

OwnSplit = Callable[[tuple[Any, ...], dict[str, Any], Any, int], Iterable[tuple[Sequence[Any], Mapping[str, Any], Any]]]
"""From positional arguments, keyword arguments, target and chunks to the same three for each micro-batch."""


Piece = tuple[Sequence[Any], Mapping[str, Any], Any]


def checked_parts(
    function: OwnSplit, arguments: tuple[Any, ...], keywords: dict[str, Any], target: Any, chunks: int
) -> list[Piece]:
    """What a function of the user's makes of a call: for each micro-batch its arguments and its target.

    Raises:
        TypeError: it returned something else.
        ValueError: it returned no micro-batch.
    """
    try:
        returned = function(arguments, keywords, target, chunks)
        parts = returned if isinstance(returned, list) else [*returned] if isinstance(returned, Iterator) else None
    except Exception as error:
        add_note(error, f"in split=, called with chunks={chunks}")
        raise
    wanted = "a list with a tuple (positional arguments, keyword arguments, target) for each micro-batch, such as "
    wanted += "[((x1,), {'mask': m1}, y1), ((x2,), {'mask': m2}, y2)]"
    if parts is None:
        raise TypeError(f"split= returned a {type(returned).__name__}: wanted {wanted}")
    for number, part in enumerate(parts):
        found = (
            f"({', '.join(type(each).__name__ for each in part)})" if isinstance(part, tuple) else type(part).__name__
        )
        if not (
            isinstance(part, tuple) and len(part) == 3 and isinstance(part[0], tuple) and isinstance(part[1], Mapping)
        ):
            raise TypeError(f"split= returned {found} for micro-batch {number}: wanted {wanted}")
        if (part[2] is None) != (target is None):
            got, has = ("no", "one") if part[2] is None else ("a", "none")
            raise ValueError(f"split= returned {got} target for micro-batch {number}, and the call has {has}")
    if not parts:
        raise ValueError("split= returned no micro-batch: wanted at least one")
    return parts


def in_micro_batches(
    function: OwnSplit, arguments: tuple[Any, ...], keywords: dict[str, Any], target: Any, chunks: int
) -> tuple[tuple[Any, ...], dict[str, Any], Any]:
    """The arguments and the target of a call as `MicroBatches`, cut by a function of the user's.

    Args:
        function: cuts them; see `Pipe`.
        arguments: the positional arguments.
        keywords: the others.
        target: of the loss; None: there is none.
        chunks: how many micro-batches are wanted; the function may return others.

    Raises:
        TypeError: see `checked_parts`.
        ValueError: likewise, or micro-batches have different arguments.

    Example:
        >>> halves = lambda inputs, keywords, target, chunks: [((inputs[0][n::2],), {}, None) for n in range(2)]
        >>> in_micro_batches(halves, ([1, 2, 3],), {}, None, 2)
        ((MicroBatches([[1, 3], [2]]),), {}, None)
    """
    parts = checked_parts(function, arguments, keywords, target, chunks)
    forms = [(len(each), sorted(names)) for each, names, _ in parts]
    for number, (count, names) in enumerate(forms):
        if (count, names) != forms[0]:
            raise ValueError(
                f"split= returned {count} positional arguments and the names {names} for micro-batch {number}, and "
                f"{forms[0][0]} and {forms[0][1]} for micro-batch 0: wanted the same for all"
            )
    columns = tuple([MicroBatches(column) for column in zip(*(each for each, _, _ in parts), strict=True)])
    named = {name: MicroBatches([names[name] for _, names, _ in parts]) for name in parts[0][1]}
    return columns, named, None if target is None else MicroBatches([of for _, _, of in parts])
