"""The function of `split=`, by which a user cuts a mini-batch that cannot be cut along the rows of its tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from pipework.model.given import MicroBatches

OwnSplit = Callable[[tuple[Any, ...], dict[str, Any], Any, int], Iterable[tuple[Sequence[Any], Mapping[str, Any], Any]]]
"""From positional arguments, keyword arguments, target and chunks to the same three for each micro-batch."""


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
        TypeError: the function returned something else than the three for each micro-batch.
        ValueError: it returned none, or micro-batches with different arguments.

    Example:
        >>> halves = lambda inputs, keywords, target, chunks: [((inputs[0][n::2],), {}, None) for n in range(2)]
        >>> in_micro_batches(halves, ([1, 2, 3],), {}, None, 2)
        ((MicroBatches([[1, 3], [2]]),), {}, None)
    """
    parts = list(function(arguments, keywords, target, chunks))
    for number, part in enumerate(parts):
        if not (isinstance(part, tuple) and len(part) == 3 and isinstance(part[1], Mapping)):
            raise TypeError(
                f"split= returned {type(part).__name__} for micro-batch {number}: wanted a tuple (positional "
                "arguments, keyword arguments, target), such as ((x,), {'mask': mask}, y)"
            )
    if not parts:
        raise ValueError("split= returned no micro-batch: wanted at least one")
    forms = [(len(each), sorted(names), of is None) for each, names, of in parts]
    wanted = target is None
    for number, (count, names, no_target) in enumerate(forms):
        if (count, names) != forms[0][:2] or no_target != wanted:
            raise ValueError(
                f"split= returned micro-batch {number} with {count} positional arguments, the names {names} and "
                f"{'no' if no_target else 'a'} target: wanted the arguments of micro-batch 0, which has {forms[0][0]} "
                f"and {forms[0][1]}, and {'no' if wanted else 'a'} target, as the call has"
            )
    columns = tuple([MicroBatches(column) for column in zip(*(each for each, _, _ in parts), strict=True)])
    named = {name: MicroBatches([names[name] for _, names, _ in parts]) for name in parts[0][1]}
    return columns, named, None if wanted else MicroBatches([of for _, _, of in parts])
