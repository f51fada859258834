"""Layers that a stage cannot train, or cannot recompute: refused by name before the first action of a step.

A scripted module keeps its tensors in C++: no alias can stand in for a parameter there, and no clone for a buffer. An
embedding with `max_norm` changes its weight in every forward, and a recomputation needs the weight of the first one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from pipework.runtime.stage.execution_views import identity
from pipework.runtime.stage.returned import layer_text

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence


def doubtful_modules(layers: Iterable[tuple[str, nn.Module]]) -> list[tuple[str, nn.Module]]:
    """The scripted modules and the embeddings with `max_norm` in these layers, with what messages call them.

    Args:
        layers: with their names.

    Example:
        >>> doubtful_modules([("0", nn.Linear(2, 2)), ("1", nn.Sequential(nn.Embedding(4, 2, max_norm=1.0)))])
        [("'0' (Embedding) of layer '1' (Sequential)", Embedding(4, 2, max_norm=1.0))]
    """
    return [
        (
            f"{path!r} ({type(module).__name__}) of {layer_text(name, layer)}" if path else layer_text(name, layer),
            module,
        )
        for name, layer in layers
        for path, module in layer.named_modules()
        if isinstance(module, torch.jit.ScriptModule) or _renorms(module)
    ]


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


def refuse_shared_scripts(found: Sequence[tuple[str, nn.Module]], shared: Collection[int]) -> None:
    """Raises a TypeError if a scripted module is run by two stages, each of which needs a copy of its own.

    Args:
        found: from `doubtful_modules`.
        shared: identities of the modules that other stages run, too.
    """
    for text, module in found:
        if isinstance(module, torch.jit.ScriptModule) and identity(module) in shared:
            raise TypeError(
                f"{text} was made by torch.jit and is used in two partitions, each of which needs a shallow copy of "
                "it: give the module that was scripted or traced, or choose a balance that puts both into one partition"
            )


def _renorms(module: nn.Module) -> bool:
    return isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.max_norm is not None
