"""Errors that name a layer: what it returned, and why a stage cannot train it or compute it again.

A scripted module keeps its tensors in C++: no alias can stand in for a parameter there, and no clone for a buffer. An
embedding with `max_norm` changes its weight in every forward, and a recomputation needs the weight of the first one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from pipework.runtime.failure import add_note
from pipework.values import nested

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence


def layer_text(name: str, module: nn.Module) -> str:
    """What a layer is called in messages; a part of a model is called by its units.

    Example:
        >>> layer_text("0", nn.ReLU())
        "layer '0' (ReLU)"
    """
    units = getattr(module, "units_text", None)
    return f"layer {name!r} ({type(module).__name__})" if units is None else f"the part {units}"


def modules_with_text(name: str, layer: nn.Module) -> Iterator[tuple[nn.Module, str]]:
    """The modules of a layer, with what they are called in messages; those of a part have the model's names.

    Example:
        >>> [text for _, text in modules_with_text("1", nn.Sequential(nn.Linear(4, 4)))]
        ["layer '1' (Sequential)", "'0' (Linear) of layer '1' (Sequential)"]
    """
    of_layer, prefix = layer_text(name, layer), getattr(layer, "state_prefix", "")
    for path, module in layer.named_modules():
        yield module, f"{path.removeprefix(prefix)!r} ({type(module).__name__}) of {of_layer}" if path else of_layer


def note_returned(error: BaseException, value: Any, giver: str | None, taker: str) -> None:
    """Adds a note to an error that may be due to a value which is no tensor.

    Args:
        error: raised by a layer or a loss that was given the value.
        value: what it was given.
        giver: the layer that returned the value; None: it is an input of the pipe.
        taker: what was given it.

    Example:
        >>> error = TypeError("linear(): argument 'input' must be Tensor, not tuple")
        >>> note_returned(error, (1, 2), "layer '0' (LSTM)", "layer '1' (Linear)")
        >>> print(error.__notes__[0].partition(". ")[0])
        pipework: layer '0' (LSTM) returned (int, int), which layer '1' (Linear) was given
    """
    if giver is None or isinstance(value, Tensor) or not isinstance(error, TypeError | AttributeError):
        return
    try:
        shown = "None" if value is None else nested.describe(nested.flatten(value)[1])
    except TypeError:  # it has a tensor with a gradient within an object
        shown = type(value).__name__
    advice = "Its forward may lack a return"
    if value is not None:
        advice = f"Wrap {giver} in a module that returns what is wanted, such as the first item of a tuple"
    add_note(error, f"{giver} returned {shown}, which {taker} was given. {advice}")


def refuse_non_finite(tensors: Iterable[Tensor | None], what: str) -> None:
    """Raises a FloatingPointError if any of the tensors holds NaN or an infinity.

    Args:
        tensors: to check; None and tensors of integers pass.
        what: their name, for the message.
    """
    for tensor in tensors:
        if tensor is None or not (tensor.is_floating_point() or tensor.is_complex()):
            continue
        if tensor.layout is torch.sparse_coo:
            tensor = tensor.coalesce().values()
        if not bool(torch.isfinite(tensor).all()):
            values = tensor.detach()
            nan, infinite = int(torch.isnan(values).sum()), int(torch.isinf(values).sum())
            raise FloatingPointError(
                f"{what} is not finite: {nan} NaN and {infinite} infinite of {values.numel()} values "
                f"(shape {tuple(values.shape)}, {values.dtype}). Look at the stage's input and layers, at the "
                "learning rate, and at the range of the dtype"
            )


def doubtful_modules(layers: Iterable[tuple[str, nn.Module]]) -> list[tuple[str, nn.Module]]:
    """The scripted modules and the embeddings with `max_norm` in these layers, with what messages call them.

    Example:
        >>> doubtful_modules([("0", nn.Linear(2, 2)), ("1", nn.Sequential(nn.Embedding(4, 2, max_norm=1.0)))])
        [("'0' (Embedding) of layer '1' (Sequential)", Embedding(4, 2, max_norm=1.0))]
    """
    named = [each for layer in layers for each in modules_with_text(*layer)]
    return [(text, module) for module, text in named if isinstance(module, torch.jit.ScriptModule) or _renorms(module)]


def refuse_untrainable(found: Sequence[tuple[str, nn.Module]], *, recomputes: bool) -> None:
    """Raises an error if one of these modules cannot be trained. Frozen ones, and those without parameters, can.

    Args:
        found: from `doubtful_modules`.
        recomputes: whether micro-batches are computed again for their backward.

    Raises:
        TypeError: a scripted module.
        ValueError: an embedding.
    """
    for text, module in found:
        trains = any(parameter.requires_grad for parameter in module.parameters())
        if _renorms(module):
            if trains and recomputes:
                raise ValueError(
                    f"{text} has max_norm={module.max_norm:g}, so each forward changes its weight in place, and a "
                    "micro-batch that is recomputed for its backward needs the weight of its first forward: give "
                    "Pipe checkpoint='never', or the embedding no max_norm"
                )
        elif trains or (recomputes and next(module.buffers(), None) is not None):
            raise TypeError(
                f"{text} was made by torch.jit and has parameters or buffers, which the workers of a pipe must "
                "replace while they train: give the module that was scripted or traced; for speed compile it, "
                "torch.compile(layer). Without gradients, under torch.no_grad(), it runs"
            )


def _renorms(module: nn.Module) -> bool:
    return isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.max_norm is not None
