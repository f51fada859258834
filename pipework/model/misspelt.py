"""Keyword inputs of a pipe, which go to its first layer: a misspelt argument of the pipe itself would go there, too."""

from __future__ import annotations

from difflib import get_close_matches
from typing import TYPE_CHECKING, Final

from pipework import torch_private
from pipework.runtime.stage.returned import layer_text
from pipework.signatures import signature_of

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import nn

_OWN: Final = ("target", "return_output", "loss_scale", "outputs")  # of `Pipe.forward`


def refuse_misspelt(keywords: Iterable[str], name: str, layer: nn.Module) -> None:
    """Raises a TypeError for a keyword that the first layer does not take, and that is written nearly as the pipe's.

    Args:
        keywords: of the inputs.
        name: of the first layer.
        layer: the first layer.

    Example:
        >>> from torch import nn
        >>> refuse_misspelt(["input"], "0", nn.Linear(2, 2))
        >>> refuse_misspelt(["targets"], "0", nn.Linear(2, 2))
        Traceback (most recent call last):
        ...
        TypeError: pipe(..., targets=...): neither the pipe takes it nor layer '0' (Linear), which gets the keyword \
inputs: did you mean target=?
    """
    for keyword in keywords:
        close = get_close_matches(keyword, _OWN, n=1)
        if close and not _may_take(layer, keyword):
            raise TypeError(
                f"pipe(..., {keyword}=...): neither the pipe takes it nor {layer_text(name, layer)}, which gets the "
                f"keyword inputs: did you mean {close[0]}=?"
            )


def _may_take(layer: nn.Module, keyword: str) -> bool:
    if torch_private.may_have_forward_hooks(layer):  # which may change the arguments
        return True
    try:
        parameters = signature_of(layer.forward).parameters
    except (TypeError, ValueError):
        return True
    return keyword in parameters or any(each.kind is each.VAR_KEYWORD for each in parameters.values())
