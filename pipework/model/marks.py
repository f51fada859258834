"""How a caller says in which way the values of a call are cut: `Chunk`, `NoChunk`, `MicroBatches` and `split=`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch
from torch import Tensor

from pipework.runtime.failure import add_note
from pipework.values import nested

if TYPE_CHECKING:
    from pipework.values.nested import Structure

NO_ROWS: Final = -1
"""In place of a micro-batch's rows: its tensors have no number of rows in common."""

WHOLE: Final = -1
"""In place of the dimension along which a tensor is cut: every micro-batch gets all of it."""

MIXED: Final = -2
"""In place of the dimension along which a tensor is joined: it is not made of rows, such as similarities of rows."""

Piece = tuple[Sequence[Any], Mapping[str, Any], Any]
"""A micro-batch: its positional arguments, its keyword arguments, and its target."""

OwnSplit = Callable[[tuple[Any, ...], dict[str, Any], Any, int], Iterable[Piece]]
"""From positional arguments, keyword arguments, target and chunks to the micro-batches; see `split` of `Pipe`."""


class NoChunk:
    """A value that every micro-batch gets whole, such as a mask of shape (1, 1, tokens, tokens).

    A tensor in it that requires a gradient gets the sum over the micro-batches.

    Args:
        value: a tensor, a container of tensors, or any object.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from pipework import Pipe
        >>> pipe = Pipe(nn.Sequential(nn.Bilinear(2, 2, 3), nn.Tanh()), chunks=2, balance=[1, 1], devices=["cpu"] * 2)
        >>> pipe(torch.ones(4, 2), NoChunk(torch.ones(2, 2))).shape
        torch.Size([4, 3])
    """

    def __init__(self, value: Any) -> None:
        self.value = value

    def __repr__(self) -> str:
        return f"NoChunk({self.value!r})"


class Chunk:
    """A value whose tensors have the rows of the batch along a dimension that need not be the first.

    Args:
        value: a tensor, or a container of tensors.
        dim: the dimension of the rows, in each of the tensors; negative ones count from the last.

    Raises:
        TypeError: `dim` is no integer.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from pipework import Pipe
        >>> class Rotated(nn.Module):
        ...     def forward(self, x, positions):  # of shapes [rows, width] and [3, rows]
        ...         return x + positions.sum(0)[:, None]
        >>> pipe = Pipe(nn.Sequential(Rotated(), nn.Tanh()), chunks=2, balance=[1, 1], devices=["cpu"] * 2)
        >>> pipe(torch.ones(4, 2), Chunk(torch.ones(3, 4), dim=1)).shape
        torch.Size([4, 2])
    """

    def __init__(self, value: Any, dim: int = 0) -> None:
        if isinstance(dim, bool) or not isinstance(dim, int):
            raise TypeError(f"Chunk got dim={dim!r}: wanted the number of the dimension that has the rows")
        self.value = value
        self.dim = dim

    def __repr__(self) -> str:
        return f"Chunk({self.value!r}, dim={self.dim})"


class MicroBatches(Sequence[Any]):
    """Micro-batches that are made already, as an argument or target of a pipe: it splits nothing.

    Their tensors may have any shapes, which need not be those of the other micro-batches. All arguments of a call that
    are `MicroBatches`, and its target, have equally many; the number may be another one in each call, and `chunks`
    does not matter. A pipe whose inputs are `MicroBatches` returns its outputs as `MicroBatches`, too.

    Args:
        values: the value of the argument for each micro-batch: a tensor, or anything nested.

    Raises:
        TypeError: the argument is no list of values, but for example a tensor.
        ValueError: there is no micro-batch.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from pipework import Pipe
        >>> pipe = Pipe(nn.Sequential(nn.Linear(4, 3), nn.Tanh()), chunks=2, balance=[1, 1], devices=["cpu", "cpu"])
        >>> outputs = pipe(MicroBatches([torch.randn(1, 7, 4), torch.randn(5, 4), torch.randn(2, 4)]))
        >>> sum(output.square().sum() for output in outputs).backward()
        >>> [tuple(output.shape) for output in outputs]
        [(1, 7, 3), (5, 3), (2, 3)]
    """

    def __init__(self, values: Iterable[Any]) -> None:
        if isinstance(values, Tensor | str | bytes | Mapping | NoChunk | Chunk) or not isinstance(values, Iterable):
            raise TypeError(
                f"MicroBatches got {type(values).__name__}: wanted a list with the value for each micro-batch, such as "
                "MicroBatches([first, second])"
            )
        self._values = tuple(values)
        if not self._values:
            raise ValueError("MicroBatches is empty: wanted the value of at least one micro-batch")

    def __len__(self) -> int:
        """The number of micro-batches."""
        return len(self._values)

    def __getitem__(self, index: Any) -> Any:
        """The value for one micro-batch; for a slice a tuple."""
        return self._values[index]

    def numel(self) -> int:
        """How many elements the tensors have; transformers' `Trainer` asks it of the inputs."""
        return sum(tensor.numel() for tensor in nested.flatten(list(self._values))[0])

    def __repr__(self) -> str:
        return f"MicroBatches({list(self._values)!r})"


def has_micro_batches(arguments: Iterable[Any], keywords: Mapping[str, Any]) -> bool:
    """Whether the caller has made the micro-batches of a call.

    Example:
        >>> has_micro_batches([1], {}), has_micro_batches([1], {"x": MicroBatches([2, 3])})
        (False, True)
    """
    return any(isinstance(value, MicroBatches) for value in (*arguments, *keywords.values()))


def checked_pieces(
    function: OwnSplit, arguments: tuple[Any, ...], keywords: dict[str, Any], target: Any, chunks: int
) -> list[Piece]:
    """The micro-batches that a function of the user's makes of a call.

    Raises:
        TypeError: the function returned something else.
    """
    try:
        returned = function(arguments, keywords, target, chunks)
        pieces = [*returned] if isinstance(returned, list | Iterator) else []
    except Exception as error:
        add_note(error, f"in split=, called with chunks={chunks}")
        raise
    wanted = (
        "wanted a list with at least one tuple (positional arguments, keyword arguments, target), one for each "
        "micro-batch, such as [((x1,), {'mask': m1}, y1), ((x2,), {'mask': m2}, y2)]; a target is "
        f"{'None, as the call has none' if target is None else 'not None, as the call has one'}"
    )
    if not pieces:
        raise TypeError(f"split= returned a {type(returned).__name__} without a micro-batch: {wanted}")
    for number, piece in enumerate(pieces):
        if not _is_piece(piece, has_target=target is not None):
            kinds = [type(each).__name__ for each in piece] if isinstance(piece, tuple) else type(piece).__name__
            raise TypeError(f"split= returned {kinds} for micro-batch {number}: {wanted}")
    return pieces


def _is_piece(piece: Any, *, has_target: bool) -> bool:
    if not (isinstance(piece, tuple) and len(piece) == 3):
        return False
    arguments, keywords, target = piece
    return isinstance(arguments, tuple) and isinstance(keywords, Mapping) and (target is not None) == has_target


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
        TypeError: see `checked_pieces`.
        ValueError: micro-batches have different arguments.

    Example:
        >>> halves = lambda inputs, keywords, target, chunks: [((inputs[0][n::2],), {}, None) for n in range(2)]
        >>> in_micro_batches(halves, ([1, 2, 3],), {}, None, 2)
        ((MicroBatches([[1, 3], [2]]),), {}, None)
    """
    pieces = checked_pieces(function, arguments, keywords, target, chunks)
    forms = [(len(each), sorted(names)) for each, names, _ in pieces]
    for number, (count, names) in enumerate(forms):
        if (count, names) != forms[0]:
            raise ValueError(
                f"split= returned {count} positional arguments and the names {names} for micro-batch {number}, and "
                f"{forms[0][0]} and {forms[0][1]} for micro-batch 0: wanted the same for all"
            )
    columns = tuple([MicroBatches(column) for column in zip(*(each for each, _, _ in pieces), strict=True)])
    named = {name: MicroBatches([names[name] for _, names, _ in pieces]) for name in pieces[0][1]}
    return columns, named, None if target is None else MicroBatches([of for _, _, of in pieces])


def flattened(
    value: Any, *, as_views: bool = True
) -> tuple[tuple[Tensor, ...], Structure | None, tuple[int | None, ...]]:
    """The tensors of a value, the structure around them, and how each of them is marked.

    Args:
        value: without `MicroBatches`.
        as_views: whether a marked tensor becomes a view, as it may also be in the value without a mark.

    Returns:
        The last has the dimension of `Chunk`, `WHOLE` in `NoChunk`, and None for a tensor without a mark.

    Raises:
        TypeError: there are `MicroBatches` in it.
        ValueError: a tensor in `Chunk` does not have its dimension.
    """
    marks: dict[int, int] = {}

    def unwrap(wrapper: NoChunk | Chunk | MicroBatches) -> Any:
        if isinstance(wrapper, MicroBatches):
            raise TypeError(
                "MicroBatches is inside of another value: wanted it as a whole argument, or as the target, with the "
                "nested value of each micro-batch in it, such as MicroBatches([{'x': first}, {'x': second}])"
            )
        inside, structure = nested.flatten(nested.replaced(wrapper.value, _MARKS, unwrap))
        viewed = [tensor.view_as(tensor) if as_views and is_dense(tensor) else tensor for tensor in inside]
        for tensor in viewed:  # what is not dense has no views, and is never split
            marks.setdefault(id(tensor), WHOLE if isinstance(wrapper, NoChunk) else _dimension(wrapper, tensor))
        return nested.unflatten(tuple(viewed), structure) if viewed else wrapper.value

    tensors, structure = nested.flatten(nested.replaced(value, _MARKS, unwrap))
    return tensors, structure, tuple([marks.get(id(tensor)) for tensor in tensors])


def _dimension(wrapper: Chunk, tensor: Tensor) -> int:
    if not -tensor.dim() <= wrapper.dim < tensor.dim():
        raise ValueError(
            f"Chunk got dim={wrapper.dim} for a tensor of shape {tuple(tensor.shape)}: wanted one of its dimensions, "
            "that of the rows"
        )
    return wrapper.dim % tensor.dim()


def is_dense(tensor: Tensor) -> bool:
    """Whether a tensor has rows that can be cut off: it is neither sparse nor nested.

    Example:
        >>> is_dense(torch.eye(2)), is_dense(torch.eye(2).to_sparse())
        (True, False)
    """
    return tensor.layout is torch.strided and not tensor.is_nested


_MARKS: Final = (NoChunk, Chunk, MicroBatches)


class OneValue(NamedTuple):
    """The value for one micro-batch of the caller's.

    Attributes:
        tensors: in it.
        structure: around them.
        split: the tensors that are not in `NoChunk`.
    """

    tensors: tuple[Tensor, ...]
    structure: Structure | None
    split: tuple[Tensor, ...]

    @classmethod
    def of(cls, value: Any) -> OneValue:
        """Of any value."""
        tensors, structure, marks = flattened(value, as_views=False)  # a tensor may be in several micro-batches
        return cls(tensors, structure, tuple([t for t, mark in zip(tensors, marks, strict=True) if mark != WHOLE]))

    @property
    def rows(self) -> int:
        """The rows that all these tensors have; `NO_ROWS` if there is no such number."""
        rows = {tensor.shape[0] if tensor.dim() else NO_ROWS for tensor in self.split}
        return rows.pop() if len(rows) == 1 else NO_ROWS


def values_for_each(named: dict[str, Any], count: int, call: Callable[[tuple[Any, ...]], Any]) -> list[OneValue]:
    """The values for each micro-batch of the caller's.

    Args:
        named: arguments by what messages call them.
        count: of the micro-batches.
        call: makes the value for a micro-batch of the values of the arguments.
    """
    for name, value in named.items():
        if not isinstance(value, MicroBatches) and OneValue.of(value).split:
            raise ValueError(
                f"{name} has tensors outside of MicroBatches, although other arguments are "
                f"MicroBatches: give MicroBatches([...]) of its {count} parts, or wrap a tensor that every micro-batch "
                "should get whole in NoChunk"
            )
    columns = [value if isinstance(value, MicroBatches) else [value] * count for value in named.values()]
    return [OneValue.of(call(values)) for values in zip(*columns, strict=True)]
