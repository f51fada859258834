"""Along which dimension each tensor that a model returns has the rows of the batch, as dry runs show it."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from torch import Tensor

from pipework.model.marks import MIXED
from pipework.model.parts.side_effects import in_mode
from pipework.model.row_dimensions import values_in

if TYPE_CHECKING:
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
