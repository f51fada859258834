"""Outputs whose dimension 0, along which they are joined, is probably not that of the rows."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipework.model.rows import IGNORE

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pipework.runtime.transport import Message


FEWEST = 4  # micro-batches of which a mask seldom selects equally many rows by chance


class OutputRows:
    """Looks at the outputs of the first mini-batch, and of the first one whose micro-batches have other rows.

    Example:
        >>> import torch
        >>> looks, outputs = OutputRows(), [((torch.zeros(8, 2),), None)] * 4
        >>> looks.doubts(outputs, [4] * 4)  # two for each row?
        []
        >>> [len(looks.doubts(outputs, [2] * 4)) for _ in range(2)]  # 8 again
        [1, 0]
    """

    def __init__(self) -> None:
        self._rows: list[int] = []
        self._sizes: list[int] = []
        self._ended = False

    def doubts(self, outputs: Sequence[Message], rows: Sequence[int]) -> list[str]:
        """What there is to be warned of, once; see `doubts_about_outputs`.

        Args:
            outputs: of the last layer, for each micro-batch, nested alike.
            rows: of each micro-batch.
        """
        if self._ended or len(rows) < 2 or [*rows] == self._rows:
            return []
        doubts = doubts_about_outputs(outputs, rows, self._sizes if self._rows[:1] != [*rows[:1]] else ())
        self._ended = bool(doubts or self._rows)
        self._rows = [*rows]
        self._sizes = [tensor.shape[0] if tensor.dim() else 0 for tensor in outputs[0][0]]
        return doubts


def doubts_about_outputs(outputs: Sequence[Message], rows: Sequence[int], before: Sequence[int] = ()) -> list[str]:
    """A text for each output tensor that has one size for all micro-batches, which does not come from their rows.

    So has a mean over the batch. Sizes that differ are left alone: joined rows that were selected by a mask are those
    that the layers select from the whole batch.

    Args:
        outputs: of the last layer, for each micro-batch, nested alike.
        rows: of each micro-batch.
        before: the sizes of a mini-batch whose micro-batches had other rows, if there was one.

    Example:
        >>> import torch
        >>> pooled, flattened = torch.zeros(1, 8), torch.zeros(40, 8)
        >>> [len(doubts_about_outputs([((each,), None)] * 2, [4, 4])) for each in (pooled, flattened)]
        [1, 0]
    """
    if len(rows) < 2:
        return []
    doubts = []
    columns = list(zip(*(tensors for tensors, _ in outputs), strict=True))
    known = before if len(before) == len(columns) else (0,) * len(columns)
    for number, (column, earlier) in enumerate(zip(columns, known, strict=True)):
        if all(part.dim() for part in column) and not _may_be_rows([part.shape[0] for part in column], rows, earlier):
            shape = tuple(column[0].shape)
            joined = (len(rows) * shape[0], *shape[1:])
            doubts.append(
                f"{'the output' if len(columns) == 1 else f'output tensor {number}'} has the shape {shape} for each of "
                f"{len(rows)} micro-batches, the first of which has {rows[0]} rows. So its dimension 0 is not that of "
                f"the rows, and joined along it, it is {joined}. If a layer takes a mean or a sum over the batch, the "
                "layers alone give another result: return what has a row for each row of the input, and take it "
                f"outside of the pipe, such as pipe(x).mean(0); or return a 0-dimensional mean. Otherwise {IGNORE}"
            )
    return doubts


def _may_be_rows(sizes: Sequence[int], rows: Sequence[int], before: int = 0) -> bool:
    """Whether sizes of dimension 0 may come from the rows: several for each row, one for several, or some of them.

    Example:
        >>> _may_be_rows([8, 8], [4, 4]), _may_be_rows([2, 2], [4, 4]), _may_be_rows([3, 1], [4, 4])
        (True, True, True)
        >>> _may_be_rows([1, 1], [4, 4]), _may_be_rows([8, 8], [4, 3]), _may_be_rows([3, 3], [4, 4])
        (False, True, True)
        >>> _may_be_rows([8] * 4, [4, 4, 4, 3]), _may_be_rows([3] * 4, [4] * 4)
        (False, False)
    """
    size, count = sizes[0], rows[0]
    if not size or not count or len({*sizes}) > 1 or (size > 1 and len(sizes) < FEWEST):
        return True
    return len({*rows}) == 1 and size != before and (size % count == 0 or (size > 1 and count % size == 0))
