"""The sample of a model: its arguments, and those for a few of its rows."""

from __future__ import annotations

import contextlib
from typing import Any

from pipework.model import mini_batch
from pipework.model.layout import Layout
from pipework.model.marks import Chunk, MicroBatches, NoChunk, has_micro_batches
from pipework.values import nested

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


def arguments_of(sample: Any) -> Arguments:
    """The positional and the keyword arguments of a sample; of micro-batches the first.

    Example:
        >>> arguments_of({"x": 1}), arguments_of((1, 2)), arguments_of(3)
        (((), {'x': 1}), ((1, 2), {}), ((3,), {}))
    """
    arguments, keywords = as_given(sample)
    return tuple([_of_one(each) for each in arguments]), {name: _of_one(each) for name, each in keywords.items()}


def few_rows(sample: Any) -> Arguments:
    """The arguments for the first rows of a sample: two, or three if their number is odd; all if they cannot be told.

    They tell what the forward does, and take little memory.

    Example:
        >>> import torch
        >>> few_rows({"x": torch.arange(8)})
        ((), {'x': tensor([0, 1])})
    """
    with contextlib.suppress(TypeError, ValueError):
        return mini_batch.arguments_of(_splits(sample)[0].micro_batches[0])
    return arguments_of(sample)


def single_rows(sample: Any) -> list[Arguments]:
    """The arguments for each of these rows alone; none if the caller has made the micro-batches.

    Raises:
        TypeError: there is no tensor to split.
        ValueError: a tensor has no rows, or others have another number of them.

    Example:
        >>> import torch
        >>> [keywords["x"].tolist() for _, keywords in single_rows({"x": torch.arange(8)})]
        [[0], [1]]
    """
    arguments, keywords = as_given(sample)
    if has_micro_batches(arguments, keywords):
        return []
    in_pairs, alone = _splits(sample)
    return [mini_batch.arguments_of(each) for each in alone.micro_batches[: in_pairs.rows[0]]]


def _splits(sample: Any) -> tuple[mini_batch.MiniBatch, mini_batch.MiniBatch]:
    """Micro-batches of two rows, or three if their number is odd, and of one row."""
    arguments, keywords = as_given(sample)
    layout = Layout.of_sample((), "", arguments, keywords)
    (rows,) = mini_batch.split(arguments, keywords, 1, layout=layout).rows
    in_pairs, alone = (mini_batch.split(arguments, keywords, count, layout=layout) for count in (rows // 2, rows))
    return in_pairs, alone


def as_given(sample: Any) -> Arguments:
    """The arguments in the wrappers that say how they are split: `Chunk`, `NoChunk`, `MicroBatches`."""
    if isinstance(sample, tuple):
        return sample, {}
    try:
        return (), dict(**sample)  # also of mappings that are no dict, such as transformers' BatchEncoding
    except TypeError:
        return (sample,), {}


def _of_one(value: Any) -> Any:
    """What one micro-batch gets of an argument."""
    if isinstance(value, MicroBatches):
        return value[0]
    return nested.replaced(value, (NoChunk, Chunk), lambda mark: mark.value)
