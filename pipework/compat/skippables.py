"""Skip connections as the old libraries have them: each tensor is popped by one layer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipework.skip import verify

if TYPE_CHECKING:
    from torch import nn


def verify_skippables(module: nn.Module) -> None:
    """Checks that each tensor is stashed by one layer and popped by one later layer.

    Raises:
        TypeError: one or more pairs of stash and pop do not match. All of them are listed.
    """
    verify.verify_skippables(module, exclusive=True)
