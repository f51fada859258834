"""Uses in which dimension 0, along which a pipe cuts, is probably not that of the batch's rows."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor, nn

from pipework import torch_private
from pipework.runtime.stage.returned import layer_text

if TYPE_CHECKING:
    import threading
    from collections.abc import Collection, Iterable, Iterator, Sequence

IGNORE = "to ignore this, use warnings.filterwarnings('ignore', category=pipework.PipeWarning)"

# What each kind of doubt means, and what to do; {} is the size of dimension 0.
_TEXTS: Final = {
    "one sequence": (
        ": two dimensions are one sequence to it. If dimension 0 is the batch, the rows of a micro-batch influence "
        "each other: give it three dimensions. Otherwise "
    ),
    "batch first": (
        ". It takes dimension 1 for the batch, but the {} rows of a micro-batch are in dimension 0, along which a pipe "
        "cuts. So these rows influence each other. Make it with batch_first=True, or transpose before and after it "
        "within the layer; give the pipe inputs of shape [B, T, D], not [T, B, D]. Otherwise "
    ),
    "either": (
        ". It takes dimension 1 for the batch, and dimension 0, along which a pipe cuts, has {} entries, as many as a "
        "micro-batch has rows. Compare pipe(x) with the module's own output, both in eval(). If they differ, make it "
        "with batch_first=True and give [B, T, D]. If they are equal, "
    ),
}


def modules_with_batch_second(layers: Iterable[tuple[str, nn.Module]]) -> list[tuple[str, nn.Module]]:
    """The modules that declare `batch_first=False`, with what they are called in messages.

    Compiled layers are left out: a hook would have them compiled again.

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
        place = layer_text(name, layer)
        for path, module in layer.named_modules():
            if getattr(module, "batch_first", None) is False:
                found.append((f"{path!r} ({type(module).__name__}) of {place}" if path else place, module))
    return found


@contextlib.contextmanager
def watched(
    modules: Sequence[tuple[str, nn.Module]], sizes: Collection[int], lock: threading.Lock
) -> Iterator[list[str]]:
    """A context in which it is noticed if these modules are given the rows of a micro-batch in dimension 0.

    Args:
        modules: from `modules_with_batch_second`. They have hooks inside of the context only.
        sizes: the rows of the micro-batches.
        lock: held while any mini-batch runs the modules, so that hooks do not come and go in the middle of a call.

    Returns:
        A list that gets a text for each module for which this is so, or cannot be told.
    """
    doubts: dict[str, tuple[str, tuple[int, ...]]] = {}  # by what the module is called: the kind, the input's shape

    def look(what: str, given: Iterable[Any]) -> None:
        shape = next((tuple(value.shape) for value in given if isinstance(value, Tensor)), ())
        kind = _doubt(shape, sizes)
        if kind is not None:
            doubts.setdefault(what, (kind, shape))

    with lock:
        handles = [
            module.register_forward_pre_hook(
                lambda module, args, kwargs, what=what: look(what, (*args, *kwargs.values())), with_kwargs=True
            )
            for what, module in modules
        ]
    found: list[str] = []
    try:
        yield found
        found += [
            f"{what} was made with batch_first=False and got an input of shape {shape}{_TEXTS[kind].format(shape[0])}"
            f"{IGNORE}"
            for what, (kind, shape) in list(doubts.items())  # another thread's mini-batch may still add some
        ]
    finally:
        with lock:
            for handle in handles:
                handle.remove()


def _doubt(shape: tuple[int, ...], sizes: Collection[int]) -> str | None:
    """Why an input of this shape may be wrong for a module with `batch_first=False`: a key of `_TEXTS`, if it may be.

    Args:
        shape: of the input.
        sizes: the rows of the micro-batches.
    """
    if len(shape) not in (2, 3) or shape[0] not in sizes:
        return None
    if len(shape) == 2:
        return "one sequence"
    # A layer that has transposed its input has the rows in dimension 1, perhaps several of them side by side.
    transposed = not shape[1] or any(size and shape[1] % size == 0 for size in sizes)
    return "either" if transposed else "batch first"
