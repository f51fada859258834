"""The commands that the forward of a skippable layer may yield."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class stash:
    """The command to stash a tensor: `yield stash(name, tensor)`.

    Args:
        name: the name of the skip connection, declared in `@skippable(stash=[...])`.
        tensor: the tensor for the layers that pop; None is passed on as None.

    Example:
        >>> def forward(self, x):
        ...     yield stash("identity", x)
        ...     return x.relu()
    """

    name: str
    tensor: Tensor | None


@dataclass(frozen=True, slots=True, eq=False)
class pop:
    """The command to get the tensor that an earlier layer has stashed: `tensor = yield pop(name)`.

    Args:
        name: the name of the skip connection, declared in `@skippable(pop=[...])`.

    Example:
        >>> def forward(self, x):
        ...     identity = yield pop("identity")
        ...     return x + identity
    """

    name: str
