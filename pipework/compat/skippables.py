"""Skip connections of the old libraries, where one layer pops each tensor."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipework.skip import verify

if TYPE_CHECKING:
    from torch import nn


def verify_skippables(module: nn.Module) -> None:
    """Checks that one layer stashes each tensor and one later layer pops it.

    Raises:
        TypeError: one or more pairs of stash and pop do not match. All of them are listed.
    """
    verify.verify_skippables(module, exclusive=True)
