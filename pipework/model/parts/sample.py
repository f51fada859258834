"""The sample of a model: its arguments, those for a few of its rows, and where the loss is in what it returns.

`ForwardArguments` has the arguments of the sample, and of later calls, by name or by position.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Final

from torch import Tensor

from pipework.model import mini_batch
from pipework.model.marks import Chunk, MicroBatches, NoChunk, checked_pieces, has_micro_batches
from pipework.model.row_dimensions import Layout
from pipework.values import nested

if TYPE_CHECKING:
    from pipework.model.marks import OwnSplit, Piece

Arguments = tuple[tuple[Any, ...], dict[str, Any]]

OF_PIPE: Final = frozenset({"target", "return_output", "loss_scale", "outputs"})
"""The arguments of a call of a pipe."""


def arguments_of(sample: Any) -> Arguments:
    """The positional and the keyword arguments of a sample; of micro-batches the first.

    Example:
        >>> arguments_of({"x": 1}), arguments_of((1, 2)), arguments_of(3)
        (((), {'x': 1}), ((1, 2), {}), ((3,), {}))
    """
    arguments, keywords = as_given(sample)
    return tuple([_of_one(each) for each in arguments]), {name: _of_one(each) for name, each in keywords.items()}


def few_rows(sample: Any) -> Arguments:
    """The arguments for the first rows of a sample: two, or three of an odd number of rows.

    They show what the forward does, and take little memory. A sample in which rows cannot be told is taken whole.

    Example:
        >>> import torch
        >>> few_rows({"x": torch.arange(8)})
        ((), {'x': tensor([0, 1])})
    """
    with contextlib.suppress(TypeError, ValueError):
        return mini_batch.arguments_of(_splits(sample)[0].micro_batches[0])
    return arguments_of(sample)


def single_rows(sample: Any) -> list[Arguments]:
    """The arguments for each row of `few_rows` alone; none if the caller has made the micro-batches.

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
    """The arguments as the caller gave them, in `Chunk`, `NoChunk` or `MicroBatches`, which say how they are split."""
    if isinstance(sample, tuple):
        return sample, {}
    try:
        return (), dict(**sample)  # also of mappings that are no dict, such as transformers' BatchEncoding
    except TypeError:
        return (sample,), {}


def _of_one(value: Any) -> Any:
    """An argument of the first micro-batch, without the marks `Chunk` and `NoChunk`."""
    one = value[0] if isinstance(value, MicroBatches) else value
    return nested.replaced(one, (NoChunk, Chunk), lambda mark: _of_one(mark.value))


@dataclass(frozen=True)
class LossPlace:
    """The place of the loss: the whole result, its entry or attribute `loss`, or the first element of a tuple.

    As the loss function of a pipe it reads what the model has computed.

    Attributes:
        key: "loss" or 0; None: the result is the loss.
        left_out: the targets that it may leave out, such as padding.
    """

    key: str | int | None
    left_out: tuple[int, ...] = field(default=(-100,), repr=False)
    pipework_source: ClassVar[str] = "the model's own loss"  # what messages call it

    @classmethod
    def in_result(cls, result: Any) -> LossPlace | None:
        """The place of the loss in a result; None: it has no loss, since the model was called without labels.

        Example:
            >>> import torch
            >>> LossPlace.in_result({"loss": torch.zeros(()), "logits": torch.zeros(2)})
            LossPlace(key='loss')
            >>> LossPlace.in_result(torch.zeros(2)) is None
            True
        """
        if isinstance(result, Tensor):
            place = cls(None)
        else:
            place = cls(0 if isinstance(result, tuple) and not hasattr(result, "loss") else "loss")
        loss = place.read(result)
        return place if isinstance(loss, Tensor) and not loss.dim() and loss.is_floating_point() else None

    def __call__(self, result: Any, target: object) -> Any:
        """The loss of a result."""
        return self.read(result)

    def _key_in(self, result: Any) -> str | int | None:
        """A forward may return a plain tuple if it is asked for one."""
        is_tuple = isinstance(result, tuple) and not hasattr(result, "loss")
        return 0 if self.key is not None and is_tuple else self.key

    def read(self, result: Any) -> Any:
        """The loss of a result; None: there is none."""
        key = self._key_in(result)
        if key is None:
            return result
        if isinstance(key, int):
            return result[key] if result else None
        return result.get(key) if isinstance(result, Mapping) else getattr(result, key, None)

    def put(self, loss: Tensor, result: Any) -> Any:
        """The result with another loss."""
        key = self._key_in(result)
        if key is None:
            return loss
        if isinstance(key, int):
            return (loss, *result[1:])
        if isinstance(result, tuple):  # with names
            return type(result)(**{**result._asdict(), key: loss})  # type: ignore[attr-defined]
        result = copy.copy(result)
        if isinstance(result, MutableMapping):
            result[key] = loss
        else:
            object.__setattr__(result, key, loss)  # also where the class is frozen
        return result


@dataclass(frozen=True)
class ForwardArguments:
    """The arguments of a model's forward, one of which is the target of its loss.

    Attributes:
        signature: of the forward.
        target: the name of the argument that the model's own loss needs; None: it has none.
    """

    signature: inspect.Signature
    target: str | None

    def by_name(self, arguments: tuple[Any, ...], keywords: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments by name."""
        bound = self.signature.bind(*arguments, **keywords)
        named = dict(bound.arguments)
        for parameter in bound.signature.parameters.values():
            if parameter.kind is parameter.VAR_KEYWORD:
                named.update(named.pop(parameter.name, {}))
        return named

    def with_arguments(self, given: Arguments, values: Mapping[str, Any]) -> Arguments:
        """The arguments with other values, or more of them."""
        arguments, keywords = given
        by_position = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        names = [name for name, each in self.signature.parameters.items() if each.kind in by_position][: len(arguments)]
        own = [values.get(name, value) for name, value in zip(names, arguments, strict=False)]
        others = {name: value for name, value in values.items() if name not in names}
        return (*own, *arguments[len(own) :]), {**keywords, **others}

    def by_position(self, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Arguments:
        """The same arguments by position, as far as possible, since a pipe has arguments of its own with their names.

        Raises:
            TypeError: one of these names can be given by name only.
        """
        bound = self.signature.bind(*arguments, **keywords)
        bound.apply_defaults()
        named = {name: value for name, value in bound.kwargs.items() if name in keywords}
        if taken := OF_PIPE.intersection(named):
            raise TypeError(
                f"the forward takes {', '.join(map(repr, sorted(taken)))} by name only, and a pipe has arguments of "
                "these names: let the forward take it by position, or rename it"
            )
        return bound.args, named

    def split(
        self, function: OwnSplit, arguments: tuple[Any, ...], keywords: dict[str, Any], target: Any, chunks: int
    ) -> list[Piece]:
        """The micro-batches that a function of the user's makes of all arguments but the target, by their names."""
        names = self.by_name(arguments, keywords)
        names.pop(self.target or "", None)
        parts = checked_pieces(function, (), names, target, chunks)
        if target is None or self.target is None:
            return parts
        return [(inputs, {**named, self.target: of}, of) for inputs, named, of in parts]
