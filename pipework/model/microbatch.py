"""Splits a mini-batch into micro-batches, and joins their outputs.

Tensors are split along the dimension of their rows. Every micro-batch gets all other values as they are.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from pipework.model.call_values import not_dense
from pipework.model.given import WHOLE, MicroBatches, flattened, is_dense, refuse_gradient
from pipework.model.layout import Layout
from pipework.model.moving import moved
from pipework.values import nested

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pipework.model.layout import Learned
    from pipework.runtime.transport import Message
    from pipework.values.nested import Structure


class Split(NamedTuple):
    """A mini-batch, split into micro-batches.

    Attributes:
        tensors: the tensors among the inputs, whole.
        sizes: for each of them its rows in each micro-batch; None: every micro-batch gets all of it.
        micro_batches: for each micro-batch the input of stage 0: a leaf for each of `tensors`, and the structure around
            them.
        rows: of each micro-batch.
        slices: for each of `tensors` its parts; none if every micro-batch gets all of it.
        dims: for each of `tensors` the dimension of its rows, or `WHOLE`.
        learned: what it shows of the arguments; None: nothing new.
    """

    tensors: tuple[Tensor, ...]
    sizes: tuple[Sequence[int] | None, ...]
    micro_batches: list[Message]
    rows: Sequence[int]
    slices: Sequence[Sequence[Tensor]]
    dims: Sequence[int]
    learned: Learned | None = None

    @property
    def is_given(self) -> bool:
        """Whether the caller has made the micro-batches."""
        return False

    @classmethod
    def of(
        cls,
        tensors: tuple[Tensor, ...],
        sizes: tuple[Sequence[int] | None, ...],
        structure: Structure | None,
        device: torch.device | None = None,
        dims: Sequence[int] | None = None,
        learned: Learned | None = None,
    ) -> Split:
        """Cuts tensors into the parts of the micro-batches.

        Args:
            tensors: the whole tensors.
            sizes: see above; at least one is not None, and all that are not None have the same length.
            structure: the structure around the tensors.
            device: the device that the tensors are moved to first; None: they stay.
            dims: see above; None: the first of each.
            learned: see above.
        """
        dims = [0] * len(tensors) if dims is None else dims
        rows = next(each for each in sizes if each is not None)
        if device is not None:
            tensors = tuple([moved(tensor, device) for tensor in tensors])
        pieces = [_leaves(*each, len(rows)) for each in zip(tensors, sizes, dims, strict=True)]
        slices = [() if each is None else parts for each, parts in zip(sizes, pieces, strict=True)]
        return cls(
            tensors, sizes, [(leaves, structure) for leaves in zip(*pieces, strict=True)], rows, slices, dims, learned
        )

    @classmethod
    def elsewhere(cls, rows: int, micro_batches: int) -> Split:
        """A mini-batch whose tensors another process has."""
        return cls((), (), [], _sizes(rows, micro_batches), [], [])

    @property
    def own_leaves(self) -> frozenset[int]:
        """The positions of the caller's own leaves that require a gradient."""
        return frozenset([n for n, tensor in enumerate(self.tensors) if tensor.is_leaf and tensor.requires_grad])

    @property
    def splits(self) -> InputSplits:
        """The sizes of the parts, to join their gradients."""
        return InputSplits(tuple([tensor.shape for tensor in self.tensors]), self.sizes, tuple(self.dims))

    def targets(
        self,
        target: Any,
        device: torch.device,
        readers: tuple[int | None, int | None] = (None, None),
        layout: Layout | None = None,
    ) -> tuple[list[Message], Sequence[int]]:
        """The targets of the micro-batches, and the rows that weigh their losses; see `split_target`."""
        return split_target(target, self.rows, device, readers, layout), self.rows

    def joined(self, outputs: Sequence[Message]) -> Joined:
        """The outputs of the mini-batch; see `join`."""
        return join(outputs, self.rows)


def split(
    arguments: tuple[Any, ...],
    keywords: dict[str, Any],
    chunks: int,
    device: torch.device | None = None,
    layout: Layout | None = None,
) -> Split:
    """Splits the pipe's arguments into micro-batches whose numbers of rows differ by one at most.

    There are `min(chunks, rows)` micro-batches, or one if there are no rows. Each gets views of the tensors, detached
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
    """
    if len(arguments) == 1 and not keywords and isinstance(arguments[0], Tensor):
        flat = flattened(arguments[0])  # a single tensor is sent without the structure of a call
    else:
        flat = flattened((arguments, keywords))
    layout = Layout() if layout is None else layout
    dims, rows, learned = layout.of_inputs(arguments, keywords, flat, chunks)
    sizes = _sizes(rows, max(1, min(chunks, rows)))
    return Split.of(flat[0], tuple([None if dim == WHOLE else sizes for dim in dims]), flat[1], device, dims, learned)


def split_target(
    target: Any,
    rows: Sequence[int],
    device: torch.device,
    readers: tuple[int | None, int | None] = (None, None),
    layout: Layout | None = None,
) -> list[Message]:
    """Splits the target of the loss like the inputs.

    Args:
        target: any nested structure; every micro-batch gets `NoChunk` and values that are not tensors as they are.
        rows: of each micro-batch.
        device: the device that the tensors are moved to.
        readers: the ranks that read the inputs and the target; None: this process does.
        layout: what is known of the target; None: nothing.

    Raises:
        TypeError: it is `MicroBatches`.
        ValueError: a tensor has another number of rows than the inputs, is sparse, or requires a gradient.

    Example:
        >>> [tensors[0].tolist() for tensors, _ in split_target(torch.arange(3), [2, 1], torch.device("cpu"))]
        [[0, 1], [2]]
    """
    if isinstance(target, MicroBatches):
        raise TypeError(
            "the target is MicroBatches and the inputs are not: give both as MicroBatches, or neither; inputs that are "
            "not are split along dimension 0"
        )
    flat = flattened(target)
    tensors, structure, _ = flat
    total = sum(rows)
    dims = (Layout() if layout is None else layout).of_target(target, flat, total)
    for tensor, dim in zip(tensors, dims, strict=True):
        refuse_gradient(tensor)
        if dim != WHOLE and not is_dense(tensor):
            raise not_dense("a target tensor", tensor)
        if dim != WHOLE and tensor.shape[dim : dim + 1] != (total,):
            raise _other_rows(total, tensor, *readers)
    there = [moved(tensor, device) for tensor in tensors]
    pieces = [
        _leaves(tensor, None if dim == WHOLE else list(rows), dim, len(rows))
        for tensor, dim in zip(there, dims, strict=True)
    ]
    columns = list(zip(*pieces, strict=True)) if pieces else [()] * len(rows)
    return [(column, structure) for column in columns]


def _other_rows(rows: int, target: Tensor, first: int | None, last: int | None) -> ValueError:
    whole = (
        "wrap a tensor that has its rows in another dimension in Chunk(value, dim=...), and one that every micro-batch "
        "should get whole in NoChunk"
    )
    shape = tuple(target.shape)
    if first == last:
        return ValueError(
            f"the inputs have {rows} rows and a target tensor has shape {shape}: wanted as many rows; {whole}"
        )
    found = f"{len(target)} rows" if shape else "no rows"
    return ValueError(
        f"the inputs on rank {first} have {rows} rows and a target tensor on rank {last} has {found}, shape {shape}: "
        "wanted as many rows, of the same mini-batch. Give all ranks of a pipe the same data in the same order (a "
        "DistributedSampler needs num_replicas=pipe.data_parallel_size and rank=pipe.data_parallel_rank); "
        f"{whole}"
    )


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


class Joined(NamedTuple):
    """The outputs of all micro-batches, joined to the outputs of the mini-batch.

    Attributes:
        tensors: joined along dimension 0, without a graph.
        structure: the structure around them.
        differentiable: for each tensor, whether any micro-batch's part requires a gradient.
        splits: the sizes of the parts of each tensor, to cut its gradient.
    """

    tensors: tuple[Tensor, ...]
    structure: Structure | None
    differentiable: tuple[bool, ...]
    splits: OutputSplits

    def value(self, tensors: tuple[Tensor, ...]) -> Any:
        """What the pipe returns, made of these tensors or of their counterparts with a graph."""
        return nested.unflatten(tensors, self.structure)


def join(outputs: Sequence[Message], rows: Sequence[int]) -> Joined:
    """Joins the micro-batches' outputs.

    Tensors are concatenated, 0-dimensional ones averaged by rows, other values collected in a list.

    Raises:
        ValueError: the outputs of two micro-batches differ in structure.
    """
    tensors, first = outputs[0]
    for number, (_, structure) in enumerate(outputs):
        if not (structure is first is None or nested.same_nesting(structure, first)):
            raise ValueError(
                "the outputs of all micro-batches must have the same nesting, but "
                f"micro-batch 0 gave {nested.describe(first)} and "
                f"micro-batch {number} gave {nested.describe(structure)}; "
                "let the last layer return the same nesting for every number of rows"
            )
    columns = list(zip(*(tensors for tensors, _ in outputs), strict=True))
    total = max(1, sum(rows))
    shares = tuple([count / total for count in rows])
    tensors = tuple([_joined([part.detach() for part in column], shares) for column in columns])
    sizes = tuple([tuple([part.shape[0] for part in column]) if column[0].dim() else None for column in columns])
    return Joined(
        tensors=tensors,
        structure=nested.collect([structure for _, structure in outputs]),
        differentiable=tuple([any(part.requires_grad for part in column) for column in columns]),
        splits=OutputSplits(sizes, shares),
    )


class OutputSplits(NamedTuple):
    """The sizes of the parts of joined outputs; cuts the gradients of the whole into those of the micro-batches.

    Attributes:
        sizes: for each tensor the rows of each micro-batch's part; None: it was averaged.
        shares: the weight of each micro-batch in an average.
    """

    sizes: tuple[tuple[int, ...] | None, ...]
    shares: tuple[float, ...]

    def cut(self, gradients: Sequence[Tensor | None]) -> list[tuple[Tensor | None, ...]]:
        """For each micro-batch the gradient of each of its output tensors."""
        columns: list[Sequence[Tensor | None]] = []
        for gradient, sizes in zip(gradients, self.sizes, strict=True):
            if gradient is None:
                columns.append([None] * len(self.shares))
            elif sizes is None:
                columns.append([gradient * share for share in self.shares])
            else:
                columns.append(gradient.split_with_sizes(sizes))
        return list(zip(*columns, strict=True))


class InputSplits(NamedTuple):
    """The sizes of the parts of split inputs; joins the gradients of the micro-batches to those of the whole tensors.

    Attributes:
        shapes: of the whole input tensors.
        sizes: for each of them its rows in each micro-batch; None: every micro-batch got all of it.
        dims: for each of them the dimension of its rows.
    """

    shapes: tuple[torch.Size, ...]
    sizes: tuple[Sequence[int] | None, ...]
    dims: tuple[int, ...]

    def join(self, gradients: Sequence[Message]) -> list[Tensor | None]:
        """For each input tensor its gradient; None where no micro-batch has one, or if nothing was sent back."""
        if not gradients:
            return [None] * len(self.shapes)
        columns = zip(*(tensors for tensors, _ in gradients), strict=True)
        return [_joined_gradient(*each) for each in zip(self.shapes, self.sizes, self.dims, columns, strict=True)]


def _sizes(rows: int, count: int) -> list[int]:
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
        pieces = [piece.data for piece in whole.split_with_sizes(sizes, dim)]
    else:  # "unsafe" parts are views with version counters of their own; those of inference mode have none
        pieces = torch.unsafe_split_with_sizes(whole, sizes, dim)
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
    like, *others = present
    if sizes is None:
        for gradient in others:
            like = like + gradient
        return like
    return torch.cat(
        [
            like.new_zeros((*shape[:dim], rows, *shape[dim + 1 :])) if gradient is None else gradient
            for rows, gradient in zip(sizes, column, strict=True)
        ],
        dim,
    )


def _joined(column: Sequence[Tensor], shares: Sequence[float]) -> Tensor:
    if column[0].dim() == 0:
        total = column[0] * shares[0]
        for part, share in zip(column[1:], shares[1:], strict=True):
            total = total + part * share
        return total
    return torch.cat(list(column)) if len(column) > 1 else column[0]
