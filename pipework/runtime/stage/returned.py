"""For errors: which layer returned a value that its successor cannot take."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from pipework.runtime.failure import add_note
from pipework.values import nested


def layer_text(name: str, module: nn.Module) -> str:
    """What a layer is called in messages.

    Example:
        >>> layer_text("0", nn.ReLU())
        "layer '0' (ReLU)"
    """
    return f"layer {name!r} ({type(module).__name__})"


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
    if value is None:
        shown, advice = "None", "Its forward may lack a return"
    else:
        try:
            shown = nested.describe(nested.flatten(value)[1])
        except TypeError:  # it has a tensor with a gradient within an object
            shown = type(value).__name__
        tuples = "A tuple becomes the arguments of the next layer, or its only one: w"
        advice = f"{tuples if isinstance(value, tuple) else 'W'}rap {giver} in a module that returns what is wanted"
        advice += ", such as its first item" if isinstance(value, tuple | list) else ""
    add_note(error, f"{giver} returned {shown}, which {taker} was given. {advice}")
