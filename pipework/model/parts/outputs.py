"""What a model returns, by its rows: their dimension in each tensor, as dry runs show it, and how they are joined."""

from __future__ import annotations

import copy
import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from pipework.model.marks import MIXED, MicroBatches
from pipework.model.parts.leaves import flatten, tensors_in, unflatten
from pipework.model.parts.side_effects import in_mode
from pipework.model.row_dimensions import values_in
from pipework.values.nested import same

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pipework.model.parts.cut import Cuttable
    from pipework.model.row_dimensions import Layout

_logger = logging.getLogger("pipework")


def output_dims(cuttable: Cuttable, layout: Layout) -> dict[str, int] | None:
    """The dimension of the rows of each tensor that a model returns, by its name, such as ``output['logits']``.

    The model runs dry on another number of rows: the size that changes in the same ratio is that of the rows. A tensor
    has `MIXED` if no size does, as in a mean over rows, or if several change, as in similarities of rows with each
    other. A number, which has no dimension, has 0.

    Args:
        cuttable: of the model.
        layout: how the arguments are cut.

    Returns:
        Those in training and in evaluation; None: the model runs in neither with another number of rows.
    """
    found: dict[str, int] = {}
    is_known = False
    rows, others, arguments, keywords = layout.of_other_rows(*cuttable.sample)
    for training, result in cuttable.results.items():
        of_others: dict[str, Tensor] | None = None
        try:
            with in_mode(cuttable.model.modules(), training=training):
                of_others = tensors_by_name(cuttable.result_of(arguments, keywords))
        except Exception:  # such as a batch norm in training that has a single row
            _logger.debug("the rows of what the model returns are not known", exc_info=True)
        is_known |= of_others is not None
        for name, tensor in tensors_by_name(result).items():
            if not tensor.dim():
                found[name] = 0
            elif of_others is not None and tensor.numel():  # what is empty for zeros shows nothing
                found[name] = _dim_of_rows(tensor, of_others.get(name), rows, others)
    return found if is_known else None


def tensors_by_name(output: Any) -> dict[str, Tensor]:
    """The tensors in what a model returns, by their names.

    Example:
        >>> import torch
        >>> list(tensors_by_name({"logits": torch.ones(2), "more": [torch.ones(1), None]}))
        ["output['logits']", "output['more'][0]"]
    """
    return {name: value for name, value, _ in values_in("output", output) if isinstance(value, Tensor)}


def _dim_of_rows(tensor: Tensor, other: Tensor | None, rows: int, others: int) -> int:
    """The dimension whose size alone differs in another tensor, and does so as the rows do; `MIXED`: there is none."""
    if other is None or other.dim() != tensor.dim():
        return MIXED
    changed = [dim for dim in range(tensor.dim()) if tensor.shape[dim] != other.shape[dim]]
    is_of_rows = len(changed) == 1 and tensor.shape[changed[0]] * others == other.shape[changed[0]] * rows
    return changed[0] if is_of_rows else MIXED


def joined(results: MicroBatches, dim: int = 0) -> Any:
    """What a model returns for a mini-batch, from what it returns for micro-batches that no pipe has cut.

    Numbers, and tensors whose other sizes differ, stay apart, as `MicroBatches`. What some results lack, such as the
    hidden states of images, is that of the others.

    Args:
        results: of the micro-batches.
        dim: along which tensors are joined; if it is not 0, those that have as many entries there as the first tensor.

    Example:
        >>> joined(MicroBatches([{"x": torch.ones(1, 2), "loss": torch.ones(())}, {"x": torch.zeros(1, 2)}]))
        {'x': tensor([[1., 1.],
                [0., 0.]]), 'loss': tensor(1.)}
    """
    sizes = [next((each.shape[dim] for each in tensors_in(result) if each.dim() > dim), 0) for result in results]
    pairs = list(zip(results, sizes, strict=True))
    if not isinstance(results[0], Mapping):
        return _joined_values(pairs, dim)
    whole: Any = copy.copy(max(results, key=len))
    for name in dict.fromkeys(name for each in results for name in each):
        whole[name] = _joined_values([(each[name], size) for each, size in pairs if each.get(name) is not None], dim)
    return whole


def _joined_values(pairs: Sequence[tuple[Any, int]], dim: int) -> Any:
    if not pairs:
        return None
    leaves, forms = zip(*(flatten(value) for value, _ in pairs), strict=True)
    if not all(same(form, forms[0]) for form in forms):
        return MicroBatches(value for value, _ in pairs)
    sizes = [size for _, size in pairs]

    def one(*column: Any) -> Any:
        shapes = [tuple(each.shape) if isinstance(each, Tensor) else () for each in column]
        has_rows = min(map(len, shapes)) > dim and (not dim or [shape[dim] for shape in shapes] == sizes)
        if has_rows and len({shape[:dim] + shape[dim + 1 :] for shape in shapes}) == 1:
            return torch.cat(column, dim)
        return column[0] if all(same(each, column[0]) for each in column) else MicroBatches(column)

    return unflatten(map(one, *leaves), forms[0])
