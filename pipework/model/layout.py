"""Along which dimension each tensor of a call has the rows of the batch, learned from the first batch or a sample.

The first tensor of a call has its rows in dimension 0, and another one where its size is the number of rows. It may
have this size by coincidence, as a mask of shape [tokens, tokens] in a batch of as many rows. So what is ambiguous is
warned of in a pipe's first mini-batch, and refused in the sample of `attach`.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Self

from torch import Tensor

from pipework.model.call_values import (
    PLAIN,
    Value,
    described,
    has_entries,
    holds_tensors,
    may_be_offsets,
    places_of,
    refuse_uncut,
    values_in,
)
from pipework.model.marks import WHOLE, has_micro_batches

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from pipework.values.nested import Structure

    Flat = tuple[Sequence[Tensor], Structure | None, Sequence[int | None]]  # what `flattened` returns

_MOST: Final = 1000  # names: a call may have others each time
_WAYS: Final = (
    "Chunk(value, dim=...) says in which dimension the rows are, and NoChunk(value) that every micro-batch needs all "
    "of it; split= and MicroBatches cut in any other way"
)


class Learned(NamedTuple):
    """What a mini-batch shows of the arguments.

    Attributes:
        dims: see `Layout`.
        others: the names of lists and objects.
        doubts: a text for each value that is cut, and perhaps should not be.
    """

    dims: dict[str, int]
    others: frozenset[str]
    doubts: list[str]


class Layout:
    """What is known of the arguments of one model.

    Args:
        names: of the positional arguments; further ones are called ``input 3``.
        target: what the target is called.

    Attributes:
        dims: for each value by its name, such as ``images[0]``, the dimension of its rows, or `WHOLE`.
    """

    def __init__(self, names: Sequence[str] = (), target: str = "target") -> None:
        self.names = tuple(names)
        self.target = target
        self.dims: dict[str, int] = {}
        self._others: frozenset[str] = frozenset()  # the names of lists and objects that are no lists of rows

    @classmethod
    def of_sample(
        cls, names: Sequence[str], target: str, arguments: Sequence[Any], keywords: Mapping[str, Any]
    ) -> Self:
        """What the sample of `attach` says; one in `MicroBatches` says nothing.

        Args:
            names: see above.
            target: see above.
            arguments: the positional arguments of the sample.
            keywords: the others.

        Raises:
            ValueError: the rows of a value cannot be told from its other sizes; the message names each such value.

        Example:
            >>> import torch
            >>> sample = {"ids": torch.ones(2, 5), "positions": torch.ones(3, 2, 5)}
            >>> Layout.of_sample((), "labels", (), sample).dims
            {'ids': 0, 'positions': 1}
        """
        layout = cls(names, target)
        if has_micro_batches(arguments, keywords):
            return layout
        nodes = list(layout._named_values(arguments, keywords))
        first = _first(nodes, layout.dims)
        if first is None:
            return layout
        rows, unclear = _rows(first), []
        for name, value, mark in nodes:
            places = places_of(value, rows)
            if mark is not None or isinstance(value, Tensor):  # what is None now may be a tensor later
                layout.dims[name] = mark if mark is not None else places[0] if places else WHOLE
            is_unclear = isinstance(value, Tensor) and (len(places) != 1 or may_be_offsets(value))
            if mark is None and (is_unclear or (rows > 1 and has_entries(value, rows))):
                unclear.append(described(name, value))
        layout._others = _others(nodes)
        if unclear:
            raise ValueError(
                f"the sample has {rows} rows (dimension {first.mark} of {first.name!r}), and does not say how "
                f"other batches are to be cut: {', '.join(unclear)}. Take a sample of a number of rows that no other "
                f"size equals, or mark values in it: {_WAYS}"
            )
        return layout

    def of_inputs(
        self, arguments: Sequence[Any], keywords: Mapping[str, Any], flat: Flat, chunks: int
    ) -> tuple[tuple[int, ...], int, Learned | None]:
        """The dimension of the rows of each tensor of a call, or `WHOLE`; the number of rows; and what to `learn`.

        Args:
            arguments: the positional arguments.
            keywords: the others.
            flat: their tensors; see `flattened`.
            chunks: at most so many micro-batches are made.

        Returns:
            The last is None if every name was known, or nothing is cut.

        Raises:
            TypeError: there is no tensor to cut.
            ValueError: a tensor has no rows, or others; or a value that is no tensor has as many entries.
        """
        nodes = list(self._named_values(arguments, keywords))
        first = _first(nodes, self.dims)
        if first is None:
            kinds = ", ".join(type(value).__name__ for value in (*arguments, *keywords.values())) or "nothing"
            raise TypeError(
                f"inputs do not have any tensors: got {kinds}; a mini-batch is split along the rows of its tensors "
                "(those in NoChunk are not split)"
            )
        found, others, learned = self._found(nodes, first), _others(nodes), None
        if min(chunks, _rows(first)) > 1 and (found.keys() - self.dims.keys() or others - self._others):
            learned = Learned(found, others, self._doubts(nodes, first, found))
            self._refuse_values(nodes, _rows(first))
        dims = _in_order(nodes, found, flat)
        rows = {_size(tensor, dim) for tensor, dim in zip(flat[0], dims, strict=True) if dim != WHOLE}
        if len(rows) > 1:
            _refuse_unequal(nodes, found)
        return dims, rows.pop(), learned

    def learn(self, learned: Learned) -> None:
        """From now on, what a mini-batch has shown that was computed without an error."""
        if len(self.dims) + len(self._others) < _MOST:
            self.dims = {**self.dims, **learned.dims}
            self._others |= learned.others

    def of_target(self, target: Any, flat: Flat, rows: int) -> tuple[int, ...]:
        """The same for a target, whose tensors have rows in dimension 0 unless a mark or a sample says otherwise.

        Args:
            target: the target.
            flat: its tensors; see `flattened`.
            rows: of the mini-batch.

        Raises:
            ValueError: a value that is no tensor has as many entries.
        """
        nodes = list(values_in(self.target, target))
        if rows > 1:
            self._refuse_values(nodes, rows, lists_of_tensors=True)
            self._others |= _others(nodes)
        found = {name: self.dims.get(name, 0) for name, value, _ in nodes if isinstance(value, Tensor)}
        return _in_order(nodes, found, flat)

    def _named_values(self, arguments: Sequence[Any], keywords: Mapping[str, Any]) -> Iterator[Value]:
        for number, value in enumerate(arguments):
            yield from values_in(self.names[number] if number < len(self.names) else f"input {number}", value)
        for name, value in keywords.items():
            yield from values_in(name, value)

    def _found(self, nodes: Sequence[Value], first: Value) -> dict[str, int]:
        """For each value without a mark the dimension of its rows, or `WHOLE`, by its name."""
        found, rows = {}, _rows(first)
        for name, value, mark in nodes:
            if mark is None and isinstance(value, Tensor):
                places = places_of(value, rows) if value is not first.value else []
                # Dimension 0, unless another one alone has the size.
                found[name] = self.dims.get(name, 0 if not places or 0 in places else places[0])
        if _other_value(nodes, found, rows):  # then the size alone says too little
            found = {name: self.dims.get(name, 0) for name in found}
        return found

    def _doubts(self, nodes: Sequence[Value], first: Value, found: Mapping[str, int]) -> list[str]:
        """A text for each value that is cut where it is not clear that its rows are."""
        rows = _rows(first)
        doubts = []
        for name, value, mark in nodes:
            if mark is not None or name in self.dims or name in self._others or value is first.value:
                continue
            dim, places = found.get(name, 0), places_of(value, rows)
            of_first = isinstance(value, list | deque) and len(value) > 1 and first.name.startswith(f"{name}[")
            if holds_tensors(value) and (len(value) == rows or of_first):
                why = (
                    f"each of its tensors is cut into {rows} rows, but it may have one entry for each row of the batch"
                )
            elif len(places) > 1:
                others = " or ".join(str(each) for each in places if each != dim)
                why = f"it is cut along dimension {dim}, but dimension {others} may also be the batch's {rows} rows"
            elif places and dim:
                why = f"it is cut along dimension {dim}, the only one of as many as the batch's {rows} rows"
            elif places and (other := _other_value(nodes, found, rows)):
                why = f"it is cut into the {rows} rows of the batch, but {rows} is also another size of {other!r}"
            elif places and may_be_offsets(value):
                why = f"it is cut into the {rows} rows of the batch, but it may hold offsets into another tensor"
            else:
                continue
            doubts.append(f"{described(name, value)}: {why}. {_WAYS}. Chunk(value, dim={dim}) confirms it")
        return doubts

    def _refuse_values(self, nodes: Iterable[Value], rows: int, *, lists_of_tensors: bool = False) -> None:
        """Raises a ValueError for a value that is no tensor, and may have an entry for each row.

        Args:
            nodes: the values.
            rows: of the mini-batch.
            lists_of_tensors: whether lists whose tensors are cut are refused, too.
        """
        for name, value, mark in nodes:
            if mark is not None or name in self.dims or name in self._others or not has_entries(value, rows):
                continue
            is_cut = holds_tensors(value)
            if not is_cut or lists_of_tensors:
                also = "if each of its tensors has the rows, give Chunk(value); " if is_cut else ""
                raise ValueError(
                    f"{described(name, value)}, as many as the batch has rows, and only tensors are cut. If each row "
                    "has one of them, give a tensor, or cut the batch yourself, with split= or MicroBatches; "
                    f"{also}if every micro-batch needs all of it, give NoChunk(value)"
                )


def _refuse_unequal(nodes: Iterable[Value], found: Mapping[str, int]) -> None:
    """Raises a ValueError that names two tensors with different numbers of rows."""
    nodes = [node for node in nodes if isinstance(node.value, Tensor)]
    dims = [(node, found.get(node.name, 0) if node.mark is None else node.mark) for node in nodes]
    cut = [(node.name, tuple(node.value.shape), dim, _size(node.value, dim)) for node, dim in dims if dim != WHOLE]
    name, shape, dim, rows = cut[0]
    other, its_shape, its_dim, _ = next(each for each in cut if each[-1] != rows)
    raise ValueError(
        f"all tensors of a batch must have the same number of rows, but {name!r} has the shape {shape} with {rows} "
        f"rows in dimension {dim}, and {other!r} has the shape {its_shape} and is cut along dimension {its_dim}. "
        f"{_WAYS}"
    )


def _in_order(nodes: Iterable[Value], found: Mapping[str, int], flat: Flat) -> tuple[int, ...]:
    """What was found for each tensor, or its mark."""
    tensors, _, marks = flat
    by_tensor: dict[int, int] = {}
    for name, value, mark in nodes:
        if mark is None and isinstance(value, Tensor):
            by_tensor.setdefault(id(value), found[name])
    return tuple([by_tensor[id(t)] if mark is None else mark for t, mark in zip(tensors, marks, strict=True)])


def _first(nodes: Iterable[Value], dims: Mapping[str, int]) -> Value | None:
    """The first tensor that is cut, marked with the dimension of its rows; None: there is none.

    Raises:
        ValueError: a tensor has no rows.
    """
    first = None
    for name, value, mark in nodes:
        known = dims.get(name) if mark is None else mark
        if isinstance(value, Tensor) and known != WHOLE:
            refuse_uncut(name, value)
            first = first or Value(name, value, known or 0)
    return first


def _rows(first: Value) -> int:
    return _size(first.value, first.mark or 0)


def _size(tensor: Tensor, dim: int) -> int:
    return tensor.shape[dim] if dim < tensor.dim() else -1


def _others(nodes: Iterable[Value]) -> frozenset[str]:
    """The names of lists and objects among the values; what is None now may be one later."""
    return frozenset([name for name, value, _ in nodes if not isinstance(value, (Tensor, *PLAIN))])


def _other_value(nodes: Iterable[Value], found: Mapping[str, int], rows: int) -> str | None:
    """A tensor that has the number of rows as another size, too."""
    for name, value, mark in nodes:
        if any(dim != (found[name] if mark is None else mark) for dim in places_of(value, rows)):
            return name
    return None
