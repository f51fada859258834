"""A mini-batch: how its inputs are cut into micro-batches, its targets and its loss, and how its outputs are joined.

It is cut along the rows of its tensors, or its caller has made the micro-batches. Every micro-batch gets all values
that are no tensors as they are. The gradients of the pieces of its inputs are joined like the outputs.
"""

from __future__ import annotations

import functools
import operator
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch
from torch import Tensor

from pipework.model.marks import (
    MIXED,
    NO_ROWS,
    WHOLE,
    MicroBatches,
    flattened,
    has_micro_batches,
    is_dense,
    values_for_each,
)
from pipework.model.row_dimensions import Layout, not_dense
from pipework.values import nested

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pipework.model.row_dimensions import Learned
    from pipework.runtime.stage.loss import InnerLoss
    from pipework.runtime.transport import Message
    from pipework.values.nested import Structure

_BITS: Final = 30  # each for a tensor, or for every thirtieth


def moved(tensor: Tensor, device: torch.device) -> Tensor:
    """The tensor on a device, for the worker there.

    The host waits only for what goes to the CPU: an accelerator's worker waits for the caller's stream, whereas a CPU
    worker reads at once.

    Example:
        >>> moved(torch.ones(2), torch.device("cpu"))
        tensor([1., 1.])
    """
    return tensor.to(device, non_blocking=device.type != "cpu")


class InputPieces(NamedTuple):
    """Which micro-batch has which piece of each tensor of a mini-batch; joins the gradients of the pieces.

    Attributes:
        shapes: of the whole tensors.
        places: for each micro-batch the number of the whole tensor that each of its tensors is a piece of.
        sizes: for each whole tensor its rows in each micro-batch; None: a micro-batch gets all of it.
        dims: for each whole tensor the dimension of its rows.
    """

    shapes: tuple[torch.Size, ...]
    places: tuple[tuple[int, ...], ...]
    sizes: tuple[Sequence[int] | None, ...]
    dims: tuple[int, ...]

    def join(self, gradients: Sequence[Message]) -> list[Tensor | None]:
        """For each whole tensor its gradient; None where no micro-batch has one, or if nothing was sent back."""
        columns: list[list[Tensor | None]] = [[None] * len(self.places) for _ in self.shapes]
        for number, ((tensors, _), places) in enumerate(zip(gradients, self.places, strict=False)):
            for gradient, place in zip(tensors, places, strict=True):
                columns[place][number] = gradient
        return [_joined_gradient(*each) for each in zip(self.shapes, self.sizes, self.dims, columns, strict=True)]


@dataclass(frozen=True)
class Outputs:
    """The outputs of a mini-batch.

    Attributes:
        tensors: without a graph.
        differentiable: for each of them, whether the part of any micro-batch requires a gradient.
        value: makes what the pipe returns of these tensors, or of their counterparts with a graph.
        cut: makes of the gradients of these tensors those of each micro-batch.
    """

    tensors: tuple[Tensor, ...]
    differentiable: tuple[bool, ...]
    value: Callable[[tuple[Tensor, ...]], Any]
    cut: Callable[[Sequence[Tensor | None]], list[tuple[Tensor | None, ...]]]


@dataclass
class MiniBatch:
    """A mini-batch in micro-batches. `Executor.run` fills in what it does not know when it is made.

    Attributes:
        tensors: the tensors among the inputs, whole, each once.
        micro_batches: for each micro-batch the input of stage 0: a leaf for each of its tensors, and the structure
            around them.
        rows: of each micro-batch; `NO_ROWS` where the caller has made it and its tensors have no number of rows.
        pieces: where the tensors are in the micro-batches.
        slices: for each of `tensors` the views of it in micro-batches.
        is_cut: whether the pipe has cut it; otherwise the caller has made the micro-batches, and outputs stay apart.
        learned: what the mini-batch shows of the arguments; None: nothing new.
        targets: of the micro-batches; None: another process has them, or the loss is outside.
        weighing: the rows that weigh the losses of the micro-batches; `NO_ROWS` where they do not.
        loss: what the last stage computes; None: the loss is outside.
        warnings: texts about what is probably not meant.
    """

    tensors: tuple[Tensor, ...]
    micro_batches: list[Message]
    rows: Sequence[int]
    pieces: InputPieces
    slices: Sequence[Sequence[Tensor]]
    is_cut: bool = True
    learned: Learned | None = None
    targets: list[Message] | None = None
    weighing: Sequence[int] = ()
    loss: InnerLoss | None = None
    warnings: list[str] = field(default_factory=list)

    @classmethod
    def of(
        cls,
        tensors: tuple[Tensor, ...],
        sizes: tuple[Sequence[int] | None, ...],
        structure: Structure | None,
        device: torch.device | None = None,
        dims: Sequence[int] | None = None,
        learned: Learned | None = None,
    ) -> MiniBatch:
        """Cuts tensors into the parts of the micro-batches.

        Args:
            tensors: the whole tensors.
            sizes: see `InputPieces`; at least one is not None, and all that are not None have the same length.
            structure: around the tensors.
            device: the device that the tensors are moved to first; None: they stay.
            dims: see `InputPieces`; None: the first of each.
            learned: see `MiniBatch`.
        """
        dims = (0,) * len(tensors) if dims is None else tuple(dims)
        rows = next(each for each in sizes if each is not None)
        if device is not None:
            tensors = tuple([moved(tensor, device) for tensor in tensors])
        columns = [_leaves(*each, len(rows)) for each in zip(tensors, sizes, dims, strict=True)]
        places = (tuple(range(len(tensors))),) * len(rows)
        return cls(
            tensors,
            [(leaves, structure) for leaves in zip(*columns, strict=True)],
            rows,
            InputPieces(tuple([tensor.shape for tensor in tensors]), places, sizes, dims),
            [() if each is None else column for each, column in zip(sizes, columns, strict=True)],
            learned=learned,
        )

    @classmethod
    def of_caller(
        cls, arguments: tuple[Any, ...], keywords: dict[str, Any], device: torch.device | None = None
    ) -> MiniBatch:
        """The micro-batches of a call with `MicroBatches` among its arguments.

        Args:
            arguments: the positional arguments. One that is no `MicroBatches` goes whole to every micro-batch.
            keywords: the keyword arguments, likewise.
            device: the device that the tensors are moved to; None: they stay.

        Raises:
            TypeError: a micro-batch has no tensor.
            ValueError: arguments have different numbers of micro-batches, or a tensor is neither in `MicroBatches` nor
                in `NoChunk`.
        """
        named = {f"input {n}": value for n, value in enumerate(arguments)}
        named |= {f"input {name!r}": value for name, value in keywords.items()}
        (first, count), *others = [
            (name, len(value)) for name, value in named.items() if isinstance(value, MicroBatches)
        ]
        for name, other in others:
            if other != count:
                raise ValueError(f"{first} has {count} micro-batches and {name} has {other}: wanted equally many")

        def call(values: tuple[Any, ...]) -> Any:
            if len(arguments) == 1 and not keywords and isinstance(values[0], Tensor):
                return values[0]  # a single tensor is sent without the structure of a call
            return values[: len(arguments)], dict(zip(keywords, values[len(arguments) :], strict=True))

        values = values_for_each(named, count, call)
        for number, value in enumerate(values):
            if not value.split:
                raise TypeError(f"micro-batch {number} does not have any tensors among its inputs: wanted at least one")
        tensors = {id(tensor): tensor for value in values for tensor in value.tensors}
        numbers = {key: number for number, key in enumerate(tensors)}
        places = tuple([tuple([numbers[id(tensor)] for tensor in value.tensors]) for value in values])
        there = tuple([tensor if device is None else moved(tensor, device) for tensor in tensors.values()])

        def leaf(tensor: Tensor) -> Tensor:
            return tensor.detach().requires_grad_(tensor.requires_grad)

        return cls(
            there,
            [
                (tuple([leaf(there[place]) for place in own]), value.structure)
                for own, value in zip(places, values, strict=True)
            ],
            [value.rows for value in values],
            InputPieces(tuple([t.shape for t in there]), places, (None,) * len(there), (WHOLE,) * len(there)),
            [()] * len(there),
            is_cut=False,
        )

    @classmethod
    def unread(cls) -> MiniBatch:
        """A mini-batch whose tensors another process has."""
        return cls((), [], (), InputPieces((), (), (), ()), ())

    def cut_as(self, rows: int, micro_batches: int, of_caller: Sequence[int] | None) -> None:
        """The rows of its micro-batches are those of the process that reads the inputs.

        Args:
            rows: of the mini-batch.
            micro_batches: how many there are.
            of_caller: the rows of each, if the caller has made them; None: the pipe cuts them.
        """
        self.rows = even_sizes(rows, micro_batches) if of_caller is None else of_caller
        self.is_cut = of_caller is None

    @property
    def shows_rows(self) -> bool:
        """Whether it shows how the layers and the loss treat rows, which the pipe has cut apart."""
        return self.is_cut and len(self.rows) > 1

    @functools.cached_property
    def required_gradients(self) -> int:
        """A number that says which tensors require a gradient, and how they are cut; 0: none does.

        The process that reads the inputs tells the others, which may want these gradients.
        """
        required = {number % _BITS for number, tensor in enumerate(self.tensors) if tensor.requires_grad}
        if not required:
            return 0
        return zlib.crc32(repr(self.pieces).encode()) << _BITS | sum(1 << number for number in required)

    @property
    def own_leaves(self) -> frozenset[int]:
        """The positions within a micro-batch, of any, at which a leaf of the caller's requires a gradient."""
        own = [tensor.is_leaf and tensor.requires_grad for tensor in self.tensors]
        return frozenset([n for places in self.pieces.places for n, place in enumerate(places) if own[place]])

    def cut_target(self, target: Any, device: torch.device, layout: Layout | None = None) -> None:
        """Sets the targets of the micro-batches, and the rows that weigh their losses.

        Args:
            target: any nested structure; every micro-batch gets `NoChunk` and values that are no tensors as they are.
            device: the device that the tensors are moved to.
            layout: what is known of the target; None: nothing.

        Raises:
            TypeError: it is `MicroBatches`, and the inputs are not.
            ValueError: a tensor has another number of rows than the inputs, is sparse, or requires a gradient; or there
                are more or fewer targets than micro-batches of the caller's.
        """
        if self.is_cut:
            self.targets = _cut_target(target, self.rows, device, layout or Layout())
            self.weighing = self.rows
            return
        if isinstance(target, MicroBatches) and len(target) != len(self.rows):
            raise ValueError(
                f"the inputs have {len(self.rows)} micro-batches and the target has {len(target)}: wanted one for each"
            )
        values = values_for_each({"the target": target}, len(self.rows), lambda values: values[0])
        for tensor in [tensor for value in values for tensor in value.tensors]:
            _refuse_gradient(tensor)
        self.targets = [
            (tuple([moved(t.detach(), device) for t in value.tensors]), value.structure) for value in values
        ]
        # Where targets differ in other sizes, too, a mean need not be one over rows.
        alike = len({tuple([tensor.shape[1:] for tensor in value.split]) for value in values}) == 1
        pairs = zip(self.rows, values, strict=True)
        self.weighing = [own if alike and own == value.rows else NO_ROWS for own, value in pairs]

    def joined(self, outputs: Sequence[Message], layout: Layout) -> Outputs:
        """The outputs of the mini-batch: joined along rows; those of micro-batches of the caller's stay apart.

        Args:
            outputs: of the micro-batches.
            layout: what is known of them.
        """
        return join(outputs, self.rows, layout) if self.is_cut else _apart(outputs)


def split(
    arguments: tuple[Any, ...],
    keywords: dict[str, Any],
    chunks: int,
    device: torch.device | None = None,
    layout: Layout | None = None,
) -> MiniBatch:
    """A call in micro-batches: those that the caller has made, or cut so that their rows differ by one at most.

    A cut makes `min(chunks, rows)` micro-batches, or one if there are no rows. Each gets views of the tensors, detached
    from their graph; a view requires a gradient if its tensor does.

    Args:
        arguments: the positional arguments.
        keywords: the keyword arguments.
        chunks: the wanted number of micro-batches.
        device: the device that the tensors are moved to first; None: they stay.
        layout: what is known of the arguments; None: nothing.

    Raises:
        TypeError: there is no tensor to split among the inputs.
        ValueError: a tensor is sparse or has no dimension to split, or tensors have different numbers of rows.

    Example:
        >>> [tuple(tensors[0].shape) for tensors, _ in split((torch.zeros(9, 2),), {}, 4).micro_batches]
        [(3, 2), (2, 2), (2, 2), (2, 2)]
        >>> [tensors[0].tolist() for tensors, _ in split((MicroBatches([torch.ones(2), torch.ones(1)]),), {}, 9)\
.micro_batches]
        [[1.0, 1.0], [1.0]]
    """
    if has_micro_batches(arguments, keywords):
        return MiniBatch.of_caller(arguments, keywords, device)
    # A single tensor is sent without the structure of a call.
    is_single = len(arguments) == 1 and not keywords and isinstance(arguments[0], Tensor)
    flat = flattened(arguments[0] if is_single else (arguments, keywords))
    layout = Layout() if layout is None else layout
    dims, rows, learned = layout.of_inputs(arguments, keywords, flat, chunks)
    sizes = even_sizes(rows, max(1, min(chunks, rows)))
    each = tuple([None if dim == WHOLE else sizes for dim in dims])
    return MiniBatch.of(flat[0], each, flat[1], device, dims, learned)


def arguments_of(message: Message) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The positional and keyword arguments of a micro-batch of `split`.

    Example:
        >>> arguments_of(split((torch.zeros(2), 5), {}, 1).micro_batches[0])
        ((tensor([0., 0.]), 5), {})
    """
    tensors, structure = message
    if structure is None:
        return tensors, {}
    arguments, keywords = nested.unflatten(tensors, structure)
    return arguments, keywords


def join(outputs: Sequence[Message], rows: Sequence[int], layout: Layout | None = None) -> Outputs:
    """Joins the outputs of micro-batches.

    Tensors are concatenated, 0-dimensional ones averaged by rows, other values collected in a list. If it is known what
    a model returns, a value that is the same for all stays alone, and there is None for a tensor that is not made of
    rows.

    Args:
        outputs: of the micro-batches.
        rows: of each.
        layout: what is known of the outputs; None: nothing.

    Raises:
        ValueError: the outputs of two micro-batches differ in structure.
    """
    first = outputs[0][1]
    for number, (_, structure) in enumerate(outputs):
        if not (structure is first is None or nested.same_nesting(structure, first)):
            raise ValueError(
                "the outputs of all micro-batches must have the same nesting, but "
                f"micro-batch 0 gave {nested.describe(first)} and "
                f"micro-batch {number} gave {nested.describe(structure)}; "
                "let the last layer return the same nesting for every number of rows"
            )
    is_known = layout is not None and layout.outputs is not None
    every = [0] * len(outputs[0][0]) if layout is None or not is_known else [*layout.of_outputs(*outputs[0]).values()]
    kept = [number for number, dim in enumerate(every) if dim != MIXED]
    dims = [every[number] for number in kept]
    columns = [[tensors[number] for tensors, _ in outputs] for number in kept]
    total = max(1, sum(rows))
    shares = [count / total for count in rows]
    pairs = zip(columns, dims, strict=True)
    sizes = [[part.shape[dim] for part in column] if column[0].dim() else None for column, dim in pairs]
    together = nested.reduced(nested.collect([structure for _, structure in outputs], equal_once=is_known), kept)

    def cut(gradients: Sequence[Tensor | None]) -> list[tuple[Tensor | None, ...]]:
        pieces: list[Sequence[Tensor | None]] = [[None] * len(rows) for _ in every]
        for number, gradient, own, dim in zip(kept, gradients, sizes, dims, strict=True):
            pieces[number] = _cut_gradient(gradient, own, dim, shares)
        return list(zip(*pieces, strict=True))

    return Outputs(
        tuple([_joined([p.detach() for p in column], dim, shares) for column, dim in zip(columns, dims, strict=True)]),
        tuple([any(part.requires_grad for part in column) for column in columns]),
        lambda tensors: nested.unflatten(tensors, together),
        cut,
    )


def _apart(outputs: Sequence[Message]) -> Outputs:
    """The outputs of micro-batches of the caller's."""
    tensors = [tensor for part, _ in outputs for tensor in part]
    counts, structures = [len(part) for part, _ in outputs], [structure for _, structure in outputs]

    def cut(flat: Sequence[Any]) -> list[tuple[Any, ...]]:
        rest = iter(flat)
        return [tuple([next(rest) for _ in range(count)]) for count in counts]

    return Outputs(
        tuple([tensor.detach() for tensor in tensors]),
        tuple([tensor.requires_grad for tensor in tensors]),
        lambda flat: MicroBatches(map(nested.unflatten, cut(flat), structures)),
        cut,
    )


def requires_gradients(value: Any) -> bool:
    """Whether an argument of a pipe has a tensor that requires a gradient.

    Example:
        >>> value = torch.ones(2, requires_grad=True)
        >>> requires_gradients({"x": value.detach()}), requires_gradients(MicroBatches([value]))
        (False, True)
    """
    return any(tensor.requires_grad for tensor in flattened(nested.replaced(value, MicroBatches, list))[0])


def gradients_are_there(wanted: int, computed: int) -> bool:
    """Whether a process that requires gradients gets them from the one that reads the inputs; see `MiniBatch`.

    Example:
        >>> gradients_are_there(0, 5), gradients_are_there(4, 5), gradients_are_there(2, 5)
        (True, True, False)
    """
    return wanted == 0 or (wanted >> _BITS == computed >> _BITS and not wanted & ~computed)


def _cut_target(target: Any, rows: Sequence[int], device: torch.device, layout: Layout) -> list[Message]:
    if isinstance(target, MicroBatches):
        raise TypeError(
            "the target is MicroBatches and the inputs are not: give both as MicroBatches, or neither; inputs that are "
            "not are split along dimension 0"
        )
    tensors, structure, _ = flat = flattened(target)
    total, columns = sum(rows), []
    for tensor, dim in zip(tensors, layout.of_target(target, flat, total), strict=True):
        _refuse_gradient(tensor)
        if dim != WHOLE and not is_dense(tensor):
            raise not_dense("a target tensor", tensor)
        if dim != WHOLE and tensor.shape[dim : dim + 1] != (total,):
            raise ValueError(
                f"the inputs have {total} rows and a target tensor has shape {tuple(tensor.shape)}: wanted as many rows"
                ", on all ranks of a pipe the same, such as by pipe.sampler(dataset). Wrap a tensor that has its rows "
                "in another dimension in Chunk(value, dim=...), and one that every micro-batch should get whole in "
                "NoChunk"
            )
        columns.append(_leaves(moved(tensor, device), None if dim == WHOLE else rows, dim, len(rows)))
    return [(pieces, structure) for pieces in (zip(*columns, strict=True) if columns else [()] * len(rows))]


def _refuse_gradient(target: Tensor) -> None:
    if target.requires_grad:
        raise ValueError(
            f"a target tensor of shape {tuple(target.shape)} requires a gradient, which it would not get: "
            "detach() it, or give it to the pipe as an input"
        )


def even_sizes(rows: int, count: int) -> list[int]:
    """The rows of each micro-batch, as in `torch.tensor_split`."""
    least, more = divmod(rows, count)
    return [least + 1] * more + [least] * (count - more)


def _leaves(tensor: Tensor, sizes: Sequence[int] | None, dim: int, count: int) -> Sequence[Tensor]:
    """The tensor's part in each micro-batch, with a version counter of its own; without sizes the whole tensor."""
    whole = tensor.detach() if tensor.requires_grad or sizes is None else tensor
    if sizes is None:
        pieces: Sequence[Tensor] = [whole] * count
        return [piece.detach().requires_grad_() for piece in pieces] if tensor.requires_grad else pieces
    if whole.is_conj() or whole.is_neg():  # which the split below would copy
        pieces = [piece.data for piece in whole.split_with_sizes(list(sizes), dim)]
    else:  # "unsafe" parts are views with version counters of their own; those of inference mode have none
        pieces = torch.unsafe_split_with_sizes(whole, list(sizes), dim)
    if tensor.requires_grad:
        for piece in pieces:
            piece.requires_grad_()
    return pieces


def _joined_gradient(
    shape: torch.Size, sizes: Sequence[int] | None, dim: int, column: Sequence[Tensor | None]
) -> Tensor | None:
    """The gradient of one input tensor."""
    present = [gradient for gradient in column if gradient is not None]
    if not present:
        return None
    like = present[0]
    if sizes is None:
        return _total(present)
    pieces = [
        like.new_zeros((*shape[:dim], rows, *shape[dim + 1 :])) if gradient is None else gradient
        for rows, gradient in zip(sizes, column, strict=True)
    ]
    return torch.cat(pieces, dim)


def _total(tensors: Sequence[Tensor]) -> Tensor:
    return functools.reduce(operator.add, tensors)


def _cut_gradient(
    gradient: Tensor | None, sizes: Sequence[int] | None, dim: int, shares: Sequence[float]
) -> Sequence[Tensor | None]:
    """For each micro-batch the gradient of its part of one output tensor."""
    if gradient is None:
        return [None] * len(shares)
    return [gradient * share for share in shares] if sizes is None else gradient.split_with_sizes(list(sizes), dim)


def _joined(column: Sequence[Tensor], dim: int, shares: Sequence[float]) -> Tensor:
    if column[0].dim() == 0:
        return _total([part * share for part, share in zip(column, shares, strict=True)])
    return torch.cat(list(column), dim) if len(column) > 1 else column[0]
