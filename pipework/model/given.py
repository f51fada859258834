"""Micro-batches that the caller has made, such as packed sequences, which cannot be cut along their rows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TypeVar

import torch
from torch import Tensor

from pipework.model.chunk import Chunk, NoChunk
from pipework.model.moving import moved
from pipework.values import nested

if TYPE_CHECKING:
    from collections.abc import Callable

    from pipework.model.layout import Layout
    from pipework.runtime.transport import Message
    from pipework.values.nested import Structure

Item = TypeVar("Item")

NO_ROWS: Final = -1
"""In place of a micro-batch's rows: its tensors have no number of rows in common."""

WHOLE: Final = -1
"""In place of the dimension along which a tensor is cut: every micro-batch gets all of it."""


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

    def __repr__(self) -> str:
        return f"MicroBatches({list(self._values)!r})"


def is_given(arguments: Iterable[Any], keywords: Mapping[str, Any]) -> bool:
    """Whether the caller has made the micro-batches of a call.

    Example:
        >>> is_given([1], {}), is_given([1], {"x": MicroBatches([2, 3])})
        (False, True)
    """
    return any(isinstance(value, MicroBatches) for value in (*arguments, *keywords.values()))


@dataclass(frozen=True)
class Given:
    """A mini-batch whose micro-batches the caller has made; see `pipework.model.microbatch.Split`.

    Attributes:
        tensors: the tensors of all micro-batches, each once.
        places: for each micro-batch the positions of its tensors in `tensors`.
        micro_batches: for each micro-batch the input of stage 0: a leaf for each of its tensors, and the structure
            around them.
        rows: of each micro-batch, or `NO_ROWS`.
    """

    tensors: tuple[Tensor, ...]
    places: tuple[tuple[int, ...], ...]
    micro_batches: list[Message]
    rows: Sequence[int]
    is_given = True
    learned = None

    @classmethod
    def elsewhere(cls, rows: Sequence[int]) -> Given:
        """A mini-batch whose tensors another process has."""
        return cls((), (), [], rows)

    @property
    def slices(self) -> list[tuple[Tensor, ...]]:
        """None: each micro-batch has tensors of its own."""
        return [()] * len(self.tensors)

    @property
    def own_leaves(self) -> frozenset[int]:
        """See `Split`: the positions within a micro-batch, of any of them."""
        own = [tensor.is_leaf and tensor.requires_grad for tensor in self.tensors]
        return frozenset([n for places in self.places for n, place in enumerate(places) if own[place]])

    @property
    def splits(self) -> GivenInputs:
        """The places of the tensors, to add up their gradients."""
        return GivenInputs(len(self.tensors), self.places)

    def targets(
        self,
        target: Any,
        device: torch.device,
        readers: tuple[int | None, int | None] = (None, None),
        layout: Layout | None = None,
    ) -> tuple[list[Message], Sequence[int]]:
        """The targets of the micro-batches, and the rows that weigh their losses; see `Split.targets`.

        Rows weigh the loss of a micro-batch if all its tensors, of input and target, have equally many, and if the
        targets of the micro-batches differ in nothing else. Otherwise a mean need not be a mean over rows.

        Raises:
            ValueError: there are more or fewer targets than micro-batches, a tensor is not in `MicroBatches`, or it
                requires a gradient.
        """
        count = len(self.rows)
        if isinstance(target, MicroBatches) and len(target) != count:
            raise ValueError(
                f"the inputs have {count} micro-batches and the target has {len(target)}: wanted one target for each"
            )
        values = _for_each({"the target": target}, count, lambda values: values["the target"])
        messages = []
        for value in values:
            for tensor in value.tensors:
                refuse_gradient(tensor)
            messages.append((tuple([moved(t.detach(), device) for t in value.tensors]), value.structure))
        alike = len({tuple([tensor.shape[1:] for tensor in value.split]) for value in values}) == 1
        rows = [own if alike and own == value.rows else NO_ROWS for own, value in zip(self.rows, values, strict=True)]
        return messages, rows

    def joined(self, outputs: Sequence[Message]) -> GivenOutputs:
        """The outputs of the micro-batches, which stay apart."""
        tensors = [tensor for part, _ in outputs for tensor in part]
        return GivenOutputs(
            tuple([tensor.detach() for tensor in tensors]),
            tuple([tensor.requires_grad for tensor in tensors]),
            tuple([structure for _, structure in outputs]),
            Counts(tuple([len(part) for part, _ in outputs])),
        )


@dataclass(frozen=True)
class GivenInputs:
    """Adds up the gradients of tensors that are in several micro-batches; see `InputSplits`.

    Attributes:
        count: of the tensors.
        places: see `Given`.
    """

    count: int
    places: tuple[tuple[int, ...], ...]

    def join(self, gradients: Sequence[Message]) -> list[Tensor | None]:
        """For each input tensor its gradient; None if no micro-batch has one."""
        sums: list[Tensor | None] = [None] * self.count
        for (tensors, _), places in zip(gradients, self.places, strict=False):  # nothing may have been sent back
            for gradient, place in zip(tensors, places, strict=True):
                earlier = sums[place]
                sums[place] = gradient if earlier is None or gradient is None else earlier + gradient
        return sums


@dataclass(frozen=True)
class Counts:
    """The number of output tensors of each micro-batch; see `OutputSplits`."""

    counts: tuple[int, ...]

    def cut(self, flat: Sequence[Item]) -> list[tuple[Item, ...]]:
        """For each micro-batch its part of what there is for all tensors."""
        rest = iter(flat)
        return [tuple([next(rest) for _ in range(count)]) for count in self.counts]


@dataclass(frozen=True)
class GivenOutputs:
    """The outputs of micro-batches that the caller has made; see `Joined`.

    Attributes:
        tensors: of all micro-batches, without a graph.
        differentiable: for each of them, whether it requires a gradient.
        structures: around the tensors of each micro-batch.
        splits: how many tensors each micro-batch has.
    """

    tensors: tuple[Tensor, ...]
    differentiable: tuple[bool, ...]
    structures: tuple[Structure | None, ...]
    splits: Counts

    def value(self, tensors: tuple[Tensor, ...]) -> MicroBatches:
        """What the pipe returns, made of these tensors or of their counterparts with a graph."""
        parts = self.splits.cut(tensors)
        return MicroBatches([nested.unflatten(part, of) for part, of in zip(parts, self.structures, strict=True)])


def given(arguments: tuple[Any, ...], keywords: dict[str, Any], device: torch.device | None = None) -> Given:
    """The micro-batches of a call with `MicroBatches` among its arguments.

    Args:
        arguments: the positional arguments. One that is no `MicroBatches` goes whole to every micro-batch.
        keywords: the keyword arguments, likewise.
        device: the device that the tensors are moved to; None: they stay.

    Raises:
        TypeError: a micro-batch has no tensor.
        ValueError: arguments have different numbers of micro-batches, or a tensor is neither in `MicroBatches` nor in
            `NoChunk`.

    Example:
        >>> import torch
        >>> [tuple(tensors[0].shape) for tensors, _ in given((MicroBatches([torch.zeros(3), torch.ones(1, 2)]),), {})\
.micro_batches]
        [(3,), (1, 2)]
    """
    named = {f"input {n}": value for n, value in enumerate(arguments)}
    named |= {f"input {name!r}": value for name, value in keywords.items()}
    counts = {name: len(value) for name, value in named.items() if isinstance(value, MicroBatches)}
    (first, count), *others = counts.items()
    for name, other in others:
        if other != count:
            raise ValueError(f"{first} has {count} micro-batches and {name} has {other}: wanted equally many")
    single = len(arguments) == 1 and not keywords

    def call(values: dict[str, Any]) -> Any:
        every = tuple(values.values())
        if single and isinstance(every[0], Tensor):
            return every[0]  # a single tensor is sent without the structure of a call
        return every[: len(arguments)], dict(zip(keywords, every[len(arguments) :], strict=True))

    values = _for_each(named, count, call)
    positions: dict[int, int] = {}
    tensors: list[Tensor] = []
    for number, value in enumerate(values):
        if not value.split:
            raise TypeError(
                f"micro-batch {number} does not have any tensors among its inputs: wanted at least one in MicroBatches"
            )
        for tensor in value.tensors:
            if id(tensor) not in positions:
                positions[id(tensor)] = len(tensors)
                tensors.append(tensor)
    there = tensors if device is None else [moved(tensor, device) for tensor in tensors]
    places = tuple([tuple([positions[id(tensor)] for tensor in value.tensors]) for value in values])
    return Given(
        tuple(there),
        places,
        [
            (tuple([_leaf(there[place]) for place in own]), value.structure)
            for own, value in zip(places, values, strict=True)
        ],
        [value.rows for value in values],
    )


@dataclass(frozen=True)
class _Value:
    """The value for one micro-batch: its tensors, the structure around them, and the tensors not in `NoChunk`."""

    tensors: tuple[Tensor, ...]
    structure: Structure | None
    split: tuple[Tensor, ...]

    @property
    def rows(self) -> int:
        """The rows that all have; `NO_ROWS` if there is no such number."""
        rows = {tensor.shape[0] if tensor.dim() else NO_ROWS for tensor in self.split}
        return rows.pop() if len(rows) == 1 else NO_ROWS


def _for_each(named: dict[str, Any], count: int, call: Callable[[dict[str, Any]], Any]) -> list[_Value]:
    """The values for each micro-batch.

    Args:
        named: arguments by what they are called in messages.
        count: of the micro-batches.
        call: makes the value for a micro-batch from the values of the arguments.
    """
    for name, value in named.items():
        if not isinstance(value, MicroBatches) and _value(value).split:
            raise ValueError(
                f"{name} has tensors outside of MicroBatches, although other arguments are "
                f"MicroBatches: give MicroBatches([...]) of its {count} parts, or wrap a tensor that every micro-batch "
                "should get whole in NoChunk"
            )
    each = ({name: v[n] if isinstance(v, MicroBatches) else v for name, v in named.items()} for n in range(count))
    return [_value(call(values)) for values in each]


def _value(value: Any) -> _Value:
    tensors, structure, marks = flattened(value, as_views=False)  # it may be in several micro-batches
    return _Value(
        tensors, structure, tuple([tensor for tensor, mark in zip(tensors, marks, strict=True) if mark != WHOLE])
    )


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
    if type(value) is Tensor:  # the usual case; subclasses take the general way below
        return (value,), None, (None,)
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


def refuse_gradient(target: Tensor) -> None:
    """Raises a ValueError if a tensor of a target requires a gradient."""
    if target.requires_grad:
        raise ValueError(
            f"a target tensor of shape {tuple(target.shape)} requires a gradient, which it would not get: "
            "detach() it, or give it to the pipe as an input"
        )


def _leaf(tensor: Tensor) -> Tensor:
    return tensor.detach().requires_grad_(tensor.requires_grad)


_MARKS: Final = (NoChunk, Chunk, MicroBatches)
