"""Warnings of a first mini-batch: dimension 0, along which a pipe cuts and joins, is probably not that of the rows."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor, nn

from pipework import torch_private
from pipework.runtime.stage.layer_errors import modules_with_text

if TYPE_CHECKING:
    import threading
    from collections.abc import Collection, Iterable, Iterator, Sequence

    from pipework.runtime.transport import Message

IGNORE: Final = "to ignore this, use warnings.filterwarnings('ignore', category=pipework.PipeWarning)"
_SECOND: Final = "It takes dimension 1 for the batch"
_FEW: Final = "It takes two dimensions for one sequence"
_FEWEST: Final = 4  # micro-batches of which a mask seldom selects equally many rows by chance


def modules_with_batch_second(layers: Iterable[tuple[str, nn.Module]]) -> list[tuple[str, nn.Module]]:
    """The modules that take dimension 1 for the batch, or two for one sequence, with what they are called in messages.

    Compiled layers are left out: a hook would have them compiled again. So are modules with `batch_first=True` with a
    forward of their own, or in evaluation mode, where a hook turns PyTorch's fused kernels off.

    Args:
        layers: with their names.

    Example:
        >>> encoder = nn.TransformerEncoderLayer(4, 2, 8)
        >>> [name for name, _ in modules_with_batch_second([("0", nn.LSTM(4, 4)), ("1", encoder)])]
        ["layer '0' (LSTM)", "'self_attn' (MultiheadAttention) of layer '1' (TransformerEncoderLayer)"]
    """
    found = []
    for name, layer in layers:
        if any(torch_private.is_compiled(each) or isinstance(each, torch.jit.ScriptModule) for each in layer.modules()):
            continue
        for each, text in modules_with_text(name, layer):
            first = getattr(each, "batch_first", None)
            of_torch = str(getattr(type(each).forward, "__module__", "")).startswith("torch.nn.")  # None under `exec`
            if first is False or (first is True and each.training and of_torch):
                found.append((text, each))
    return found


@contextlib.contextmanager
def batch_second_noticed(
    modules: Sequence[tuple[str, nn.Module]], sizes: Collection[int], lock: threading.Lock
) -> Iterator[list[str]]:
    """A context in which it is noticed if these modules are given the rows of a micro-batch in dimension 0.

    Args:
        modules: from `modules_with_batch_second`. They have hooks inside of the context only.
        sizes: the rows of the micro-batches.
        lock: held while any mini-batch runs the modules, so that hooks do not come and go in the middle of a call.

    Returns:
        A list that gets a warning for each module for which this is so.
    """
    names = {module: f"{what} was made with batch_first={module.batch_first}" for what, module in modules}
    shapes: dict[str, tuple[int, ...]] = {}  # by what the module is called

    def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        values = (*args, *kwargs.values())
        shape = next((tuple(value.shape) for value in values if isinstance(value, Tensor)), ())
        if len(shape) in ((2,) if module.batch_first else (2, 3)) and shape[0] in sizes:
            shapes.setdefault(names[module], shape)

    with lock:
        handles = [module.register_forward_pre_hook(note, with_kwargs=True) for module in names]
    found: list[str] = []
    try:
        yield found
        found += [
            f"{what} and got an input of shape {shape}. {_FEW if len(shape) == 2 else _SECOND}, and a pipe cuts "
            "along dimension 0, which has as many entries as a micro-batch has rows: then the rows of a micro-batch "
            "influence each other. Make it with batch_first=True and give it [B, T, D], or transpose before and after "
            "it within the layer. If pipe(x) equals the module's own output, both in eval(), the layers are right: "
            f"{IGNORE}"
            for what, shape in list(shapes.items())  # another thread's mini-batch may still add some
        ]
    finally:
        with lock:
            for handle in handles:
                handle.remove()


class OutputRows:
    """Compares the outputs of the first mini-batch, and of the first one whose micro-batches have other rows.

    Example:
        >>> rows, outputs = OutputRows(), [((torch.zeros(8, 2),), None)] * 4
        >>> rows.warnings(outputs, [4] * 4)  # two for each row?
        []
        >>> [len(rows.warnings(outputs, [2] * 4)) for _ in range(2)]  # 8 again
        [1, 0]
    """

    def __init__(self) -> None:
        self._rows: list[int] = []
        self._sizes: list[int] = []
        self._ended = False

    def warnings(self, outputs: Sequence[Message], rows: Sequence[int]) -> list[str]:
        """A text for each output tensor that has one size for all micro-batches, which does not come from their rows.

        So has a mean over the batch. Sizes that differ are left alone: joined rows that a mask selects are those that
        the layers select from the whole batch.

        Args:
            outputs: of the last layer, for each micro-batch, nested alike.
            rows: of each micro-batch.
        """
        if self._ended or len(rows) < 2 or [*rows] == self._rows:
            return []
        columns = list(zip(*(tensors for tensors, _ in outputs), strict=True))
        sizes = [[part.shape[0] if part.dim() else 0 for part in column] for column in columns]
        # A first mini-batch has nothing to be compared with, even if its outputs hold no tensor.
        compared = len(self._sizes) == len(columns) and self._rows[:1] not in ([], [rows[0]])
        known = self._sizes if compared else [0] * len(columns)
        found = [
            f"{'the output' if len(columns) == 1 else f'output tensor {number}'} has the shape "
            f"{tuple(columns[number][0].shape)} for each of {len(rows)} micro-batches, the first of which has "
            f"{rows[0]} rows. So its dimension 0 is not that of the rows, and the pipe joins along it. If a layer "
            "takes a mean or a sum over the batch, the layers alone give another result: return what has a row for "
            "each row of the input, and take the mean outside of the pipe, such as pipe(x).mean(0); or return a "
            f"0-dimensional mean. Otherwise {IGNORE}"
            for number, (each, before) in enumerate(zip(sizes, known, strict=True))
            if not _may_be_rows(each, rows, before)
        ]
        self._ended = bool(found or self._rows)
        self._rows, self._sizes = [*rows], [each[0] for each in sizes]
        return found


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
    if not size or not count or len({*sizes}) > 1 or (size > 1 and len(sizes) < _FEWEST):
        return True
    return len({*rows}) == 1 and size != before and (size % count == 0 or (size > 1 and count % size == 0))
