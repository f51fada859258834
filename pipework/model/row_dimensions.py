"""Along which dimension each tensor of a call has the rows of the batch, learned from the first batch or a sample.

The first tensor of a call has its rows in dimension 0, and another one where its size is the number of rows. It may
have this size by coincidence, as a mask of shape [tokens, tokens] in a batch of as many rows. So what is ambiguous is
warned of in a pipe's first mini-batch, and refused in the sample of `attach`.
"""

from __future__ import annotations

import dataclasses
import enum
from collections import deque
from types import BuiltinFunctionType, FunctionType
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Self

import torch
from torch import Tensor

from pipework.model.marks import WHOLE, Chunk, NoChunk, has_micro_batches, is_dense
from pipework.torch_private import pytree
from pipework.values import nested

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from pipework.values.nested import Structure

    Flat = tuple[Sequence[Tensor], Structure | None, Sequence[int | None]]  # what `flattened` returns

_MOST: Final = 1000  # names that are remembered, since each call may have other names
_DEPTH: Final = 3  # of objects in objects
_PLAIN: Final = (
    type(None), bool, int, float, complex, str, bytes, type, enum.Enum, torch.dtype, torch.device, torch.Generator,
    FunctionType, BuiltinFunctionType,
)  # fmt: skip
_WAYS: Final = (
    "Chunk(value, dim=...) says in which dimension the rows are, and NoChunk(value) that every micro-batch needs all "
    "of it; split= and MicroBatches cut in any other way"
)


_PACKED: Final = (
    "If {} says where sequences begin that are packed one behind the other, cut the batch between them, with split= or "
    "MicroBatches: they are in one row, and each micro-batch has other beginnings. "
)


class Value(NamedTuple):
    """A value among the arguments: a tensor, a list or tuple, or what has no parts.

    Attributes:
        name: such as ``images[0]``.
        value: without a mark.
        mark: the dimension of `Chunk`, `WHOLE` in `NoChunk`; None: there is no mark around it.
    """

    name: str
    value: Any
    mark: int | None


def values_in(name: str, value: Any, wrapper: Chunk | NoChunk | None = None) -> Iterator[Value]:
    """A value and, if it is a container, what it contains, at any depth.

    Args:
        name: of the value.
        value: perhaps with a mark.
        wrapper: the mark around it, if there is one.

    Example:
        >>> [each.name for each in values_in("batch", {"ids": torch.ones(2), "more": [1, None]})]
        ["batch['ids']", "batch['more']", "batch['more'][0]", "batch['more'][1]"]
    """
    while isinstance(value, NoChunk | Chunk):
        value, wrapper = value.value, value
    parts = _parts(value)
    if parts is None or _is_list(value):
        mark = None if wrapper is None else WHOLE
        if isinstance(wrapper, Chunk):
            mark = wrapper.dim % max(value.dim(), 1) if isinstance(value, Tensor) else 0
        yield Value(name, value, mark)
    for place, part in parts or ():
        yield from values_in(name + place, part, wrapper)


def _parts(value: Any) -> list[tuple[str, Any]] | None:
    """What a container contains, and where; None: `nested.flatten` does not open the value."""
    if isinstance(value, dict):
        return [(f"[{key!r}]", part) for key, part in value.items()]
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return [(f".{field}", part) for field, part in zip(value._fields, value, strict=True)]
    if isinstance(value, list | tuple):
        return [(f"[{number}]", part) for number, part in enumerate(value)]
    if isinstance(value, Tensor):
        return None
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [(f".{field}", part) for field, part in nested.fields_of(value).items()]
    parts, _ = pytree.tree_flatten(value, is_leaf=lambda each: each is not value)
    return None if len(parts) == 1 and parts[0] is value else [(f"[{n}]", part) for n, part in enumerate(parts)]


class Learned(NamedTuple):
    """What a mini-batch shows of the arguments.

    Attributes:
        dims: see `Layout`.
        entries: for each list or object without a mark, by its name, how many entries it has; see `_entries`.
        doubts: a text for each value that is cut, and perhaps should not be.
    """

    dims: dict[str, int]
    entries: dict[str, int | None]
    doubts: list[str]


class Layout:
    """What is known of the arguments of one model.

    Args:
        names: of the positional arguments; further ones are called ``input 3``.
        target: what the target is called.

    Attributes:
        dims: for each value by its name, such as ``images[0]``, the dimension of its rows, or `WHOLE`.
        is_given: whether it is of a model's own forward, and stays when a layer is replaced.
        outputs: for each tensor that a model returns, by its name, such as ``output['logits']``, the dimension of its
            rows, or `MIXED`; None: nothing is known.
    """

    def __init__(self, names: Sequence[str] = (), target: str = "target") -> None:
        self.names = tuple(names)
        self.target = target
        self.dims: dict[str, int] = {}
        self.is_given = False
        self.outputs: dict[str, int] | None = None
        # How many entries lists and objects had in earlier batches. A list of 3 names beside 8 rows has no name for
        # each row. So where a later batch has 3 rows and the list still has 3 names, it is not taken for one of rows.
        self._entries: dict[str, int | None] = {}

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
            >>> sample = {"ids": torch.ones(2, 5), "positions": torch.ones(3, 2, 5)}
            >>> Layout.of_sample((), "labels", (), sample).dims
            {'ids': 0, 'positions': 1}
        """
        layout = cls(names, target)
        if has_micro_batches(arguments, keywords):
            return layout
        nodes = list(layout._named_values(arguments, keywords))
        first, rows = _first(nodes, {})
        if first is None:
            return layout
        unclear = []
        for name, value, mark in nodes:
            if mark is not None:
                layout.dims[name] = mark
                continue
            is_unclear = rows > 1 and has_entries(value, rows)
            if isinstance(value, Tensor):  # what is None now may be a tensor later
                places = _places(value, rows)
                layout.dims[name] = places[0] if places else WHOLE
                is_unclear = len(places) != 1 or may_be_offsets(value)
            if is_unclear:
                unclear.append(_described(name, value))
        layout._entries = _entries_by_name(nodes)
        if unclear:
            raise ValueError(
                f"the sample has {rows} rows (dimension {first.mark} of {first.name!r}), and does not say how "
                f"other batches are to be cut: {', '.join(unclear)}. {_packed(nodes)}Take a sample of a number of "
                f"rows that no other size equals, or mark values in it: {_WAYS}"
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
            The last is None if the call shows nothing new, or nothing is cut.

        Raises:
            TypeError: there is no tensor to cut.
            ValueError: a tensor has no rows, or another number of rows; or a value that is no tensor has an entry for
                each row.
        """
        nodes = list(self._named_values(arguments, keywords))
        first, rows = _first(nodes, self.dims)
        if first is None:
            kinds = ", ".join(type(value).__name__ for value in (*arguments, *keywords.values())) or "nothing"
            raise TypeError(
                f"inputs do not have any tensors: got {kinds}; a mini-batch is split along the rows of its tensors "
                "(those in NoChunk are not split)"
            )
        found, entries, learned = self._found(nodes, first, rows), _entries_by_name(nodes), None
        if min(chunks, rows) > 1 and (found.keys() - self.dims.keys() or entries.items() - self._entries.items()):
            learned = Learned(found, entries, self._doubts(nodes, first, rows, found))
            self._refuse_entries(nodes, rows)
        cut = [
            (_size(value, dim), f"{name!r} has the shape {tuple(value.shape)} and is cut along dimension {dim}")
            for name, value, mark in nodes
            if isinstance(value, Tensor) and (dim := found[name] if mark is None else mark) != WHOLE
        ]
        for size, other in cut:
            if size != cut[0][0]:
                raise ValueError(
                    f"all tensors of a batch must have the same number of rows, but {cut[0][1]}, and {other}. "
                    f"{_packed(nodes)}{_WAYS}"
                )
        return _in_order(nodes, found, flat), cut[0][0], learned

    def learn(self, learned: Learned) -> None:
        """From now on, what a mini-batch has shown that was computed without an error."""
        if len(self.dims) + len(self._entries) < _MOST:
            self.dims = {**self.dims, **learned.dims}
            self._entries = {**self._entries, **learned.entries}

    def of_target(self, target: Any, flat: Flat, rows: int) -> tuple[int, ...]:
        """The dimension of the rows of each tensor of a target: 0, unless a mark or a sample says otherwise.

        Args:
            target: the target.
            flat: its tensors; see `flattened`.
            rows: of the mini-batch.

        Raises:
            ValueError: a value that is no tensor has an entry for each row.
        """
        nodes = list(values_in(self.target, target))
        if rows > 1:
            self._refuse_entries(nodes, rows, lists_of_tensors=True)
            if entries := _entries_by_name(nodes):
                self.learn(Learned({}, entries, []))
        found = {name: self.dims.get(name, 0) for name, value, _ in nodes if isinstance(value, Tensor)}
        return _in_order(nodes, found, flat)

    def of_outputs(self, tensors: tuple[Tensor, ...], structure: Structure | None) -> dict[str, int]:
        """The dimension of the rows of each tensor of an output, or `MIXED`, by its name: 0, unless more is known.

        Raises:
            ValueError: there is a number that the model did not return for the sample, such as a loss.
        """
        names: dict[int, str] = {}
        for name, value, _ in values_in("output", nested.unflatten(tensors, structure)):
            if isinstance(value, Tensor):
                names.setdefault(id(value), name)
                if self.outputs is not None and not value.dim() and name not in self.outputs:
                    raise ValueError(
                        f"the model returned {name}, a number that it did not return for the sample, and so it is not "
                        "known how those of micro-batches make that of the mini-batch: attach the pipe with a sample "
                        "for which the model returns it, such as one with labels, or leave out what makes it return it"
                    )
        return {names[id(tensor)]: (self.outputs or {}).get(names[id(tensor)], 0) for tensor in tensors}

    def of_other_rows(
        self, arguments: tuple[Any, ...], keywords: dict[str, Any]
    ) -> tuple[int, int, tuple[Any, ...], dict[str, Any]]:
        """The arguments for the first row, or for the only row twice.

        Returns:
            How many rows the arguments had, how many they have now, and these arguments.

        Example:
            >>> layout = Layout()
            >>> layout.dims = {"x": 1}
            >>> rows, fewer, _, keywords = layout.of_other_rows((), {"x": torch.zeros(3, 2), "scale": 2.0})
            >>> rows, fewer, keywords["x"].shape
            (2, 1, torch.Size([3, 1]))
        """
        nodes = self._named_values(arguments, keywords)
        dims = {id(value): self.dims.get(name, WHOLE) for name, value, _ in nodes if isinstance(value, Tensor)}
        rows = 0

        def other(tensor: Tensor) -> Tensor:
            nonlocal rows
            if (dim := dims[id(tensor)]) == WHOLE:
                return tensor
            rows = tensor.shape[dim]
            return tensor.narrow(dim, 0, 1) if rows > 1 else torch.cat([tensor, tensor], dim)

        arguments, keywords = nested.replaced((arguments, keywords), Tensor, other)
        return rows, 1 if rows > 1 else 2, arguments, keywords

    def _named_values(self, arguments: Sequence[Any], keywords: Mapping[str, Any]) -> Iterator[Value]:
        for number, value in enumerate(arguments):
            yield from values_in(self.names[number] if number < len(self.names) else f"input {number}", value)
        for name, value in keywords.items():
            yield from values_in(name, value)

    def _found(self, nodes: Sequence[Value], first: Value, rows: int) -> dict[str, int]:
        """For each tensor without a mark the dimension of its rows, or `WHOLE`, by its name."""
        found = {}
        for name, value, mark in nodes:
            if mark is None and isinstance(value, Tensor):
                places = _places(value, rows) if value is not first.value else []
                # Dimension 0, unless another one alone has the size.
                found[name] = self.dims.get(name, 0 if not places or 0 in places else places[0])
        if _has_other_size(nodes, found, rows):  # then the size alone says too little
            found = {name: self.dims.get(name, 0) for name in found}
        return found

    def _is_known(self, name: str, value: Any) -> bool:
        return name in self.dims or (name in self._entries and self._entries[name] == _entries(value))

    def _doubts(self, nodes: Sequence[Value], first: Value, rows: int, found: Mapping[str, int]) -> list[str]:
        """A text for each value that is cut where it is not clear that its rows are."""
        doubts, has_twice = [], _has_other_size(nodes, found, rows)
        for name, value, mark in nodes:
            if mark is not None or value is first.value or self._is_known(name, value):
                continue
            dim, places = found.get(name, 0), _places(value, rows)
            if _holds_tensors(value):  # as many as rows may be one for each row; a list may be all that there is to cut
                of_first = isinstance(value, list | deque) and len(value) > 1 and first.name.startswith(f"{name}[")
                is_clear = len(value) != rows and not (of_first and name not in self._entries)
            else:
                is_only_place = places == [0] and not dim
                is_clear = not places or (is_only_place and not has_twice and not may_be_offsets(value))
            if not is_clear:
                doubts.append(
                    f"{_described(name, value)}, and is cut along dimension {dim} into the batch's {rows} rows. Its "
                    "shape does not show that these are its rows: another size is the same, or it may have one entry "
                    f"for each row, or offsets into another tensor. {_WAYS}. Chunk(value, dim={dim}) confirms it"
                )
        return doubts

    def _refuse_entries(self, nodes: Iterable[Value], rows: int, *, lists_of_tensors: bool = False) -> None:
        """Raises a ValueError for a value that is no tensor, and may have an entry for each row.

        Args:
            nodes: the values.
            rows: of the mini-batch.
            lists_of_tensors: whether lists whose tensors are cut are refused, too.
        """
        for name, value, mark in nodes:
            if mark is not None or (_holds_tensors(value) and not lists_of_tensors) or self._is_known(name, value):
                continue
            if has_entries(value, rows):
                raise ValueError(
                    f"{_described(name, value)}, as many as the batch has rows, and only tensors are cut. If each row "
                    "has one of them, give a tensor, or cut the batch yourself, with split= or MicroBatches; "
                    "if each of its tensors has the rows, give Chunk(value); if every micro-batch needs all of it, "
                    "give NoChunk(value)"
                )


def _first(nodes: Iterable[Value], dims: Mapping[str, int]) -> tuple[Value | None, int]:
    """The first tensor that is cut, marked with the dimension of its rows, and their number; None: there is none.

    Raises:
        ValueError: a tensor has no rows.
    """
    first, rows = None, 0
    for name, value, mark in nodes:
        known = dims.get(name) if mark is None else mark
        if not isinstance(value, Tensor) or known == WHOLE:
            continue
        if not is_dense(value):
            raise not_dense(repr(name), value)
        if not value.dim():
            raise ValueError(
                f"{name!r} is 0-dimensional and cannot be split into micro-batches: give it a dimension of the batch's "
                "rows, or wrap it in NoChunk, so that every micro-batch gets it as it is"
            )
        if first is None:
            first, rows = Value(name, value, known or 0), _size(value, known or 0)
    return first, rows


def _in_order(nodes: Iterable[Value], found: Mapping[str, int], flat: Flat) -> tuple[int, ...]:
    """For each tensor in `flat` its mark, or the dimension in `found`."""
    tensors, _, marks = flat
    by_tensor: dict[int, int] = {}
    for name, value, mark in nodes:
        if mark is None and isinstance(value, Tensor):
            by_tensor.setdefault(id(value), found[name])
    return tuple([by_tensor[id(t)] if mark is None else mark for t, mark in zip(tensors, marks, strict=True)])


def _size(tensor: Tensor, dim: int) -> int:
    return tensor.shape[dim] if dim < tensor.dim() else -1


def _places(value: Any, rows: int) -> list[int]:
    """The dimensions of a tensor that have this size."""
    return [dim for dim, size in enumerate(value.shape) if size == rows] if isinstance(value, Tensor) else []


def _has_other_size(nodes: Iterable[Value], found: Mapping[str, int], rows: int) -> bool:
    """Whether a tensor has the number of rows as another size, too."""
    return any(
        dim != (found[name] if mark is None else mark) for name, value, mark in nodes for dim in _places(value, rows)
    )


def may_be_offsets(tensor: Tensor) -> bool:
    """Whether a tensor may say where sequences begin: 0, and then numbers that grow, by other steps than 1.

    Example:
        >>> may_be_offsets(torch.tensor([0, 8, 10])), may_be_offsets(torch.tensor([0, 1, 2]))
        (True, False)
    """
    if tensor.dim() != 1 or tensor.is_floating_point() or tensor.is_complex() or tensor.is_meta or len(tensor) < 2:
        return False
    steps = tensor.long().diff()
    return bool((tensor[0] == 0) & (steps >= 0).all() & (steps > 1).any())


def _packed(nodes: Iterable[Value]) -> str:
    """What to do about values that may say where packed sequences begin; empty: there are none."""
    names = [name for name, value, _ in nodes if isinstance(value, Tensor) and may_be_offsets(value)]
    return _PACKED.format(" or ".join(map(repr, names))) if names else ""


def has_entries(value: Any, rows: int) -> bool:
    """Whether what is no tensor has an entry for each row, or holds something that has, at some depth.

    Example:
        >>> has_entries(["a", "b"], 2), has_entries(["a", "b"], 3)
        (True, False)
    """
    if isinstance(value, (Tensor, *_PLAIN)):
        return False
    if _is_list(value):
        return len(value) == rows
    return _entries(value) == rows or hasattr(value, "__next__") or _holds_entries(value, rows, _DEPTH)


def _is_list(value: Any) -> bool:
    """Whether a value is a container whose parts have no names: a dict with numbers as keys is one, too."""
    if isinstance(value, dict):
        return bool(value) and not any(isinstance(key, str) for key in value)
    return isinstance(value, list | tuple | deque) and not hasattr(value, "_fields")


def _holds_entries(value: Any, rows: int, depth: int) -> bool:
    """Whether an object holds a tensor with so many rows in any dimension, or another value with as many entries."""
    for each in nested.attributes_of(value).values() if depth else ():
        for leaf in pytree.tree_leaves(each, is_leaf=lambda part: _is_list(part) and len(part) == rows):
            if isinstance(leaf, Tensor):
                if is_dense(leaf) and rows in leaf.shape:
                    return True
            elif not isinstance(leaf, _PLAIN) and (_entries(leaf) == rows or _holds_entries(leaf, rows, depth - 1)):
                return True
    return False


def _entries(value: Any) -> int | None:
    """How many entries a list or an object says that it has."""
    shape = getattr(value, "shape", None)
    if isinstance(shape, tuple) and shape and isinstance(shape[0], int):
        return shape[0]
    try:
        return len(value)
    except TypeError:
        return None


def _entries_by_name(nodes: Iterable[Value]) -> dict[str, int | None]:
    """The numbers of entries of the lists and objects without a mark; what is None now may be one later."""
    return {
        name: _entries(value)
        for name, value, mark in nodes
        if mark is None and not isinstance(value, (Tensor, *_PLAIN))
    }


def _holds_tensors(value: Any) -> bool:
    """Whether a value is a container of tensors, which are cut."""
    return _is_list(value) and any(isinstance(each, Tensor) for each in pytree.tree_leaves(value))


def _described(name: str, value: Any) -> str:
    """What a value is, for messages."""
    if isinstance(value, Tensor):
        return f"{name!r} has the shape {tuple(value.shape)}"
    entries = _entries(value)
    held = "values inside" if entries is None else f"{entries} entr{'y' if entries == 1 else 'ies'}"
    return f"{name!r} is a {type(value).__name__} with {held}"


def not_dense(what: str, tensor: Tensor) -> ValueError:
    """The error of a tensor that has no rows which can be cut off."""
    kind = "a nested tensor" if tensor.is_nested else f"not dense (layout {tensor.layout})"
    return ValueError(
        f"{what} is {kind}, and only dense tensors are split into micro-batches: make it dense, wrap it in NoChunk if "
        "every micro-batch should get it whole, or split the mini-batch yourself and give its parts in MicroBatches"
    )
