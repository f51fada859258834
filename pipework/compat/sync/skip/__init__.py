"""Skip connections."""

from pipework.compat.sync.skip.namespace import Namespace
from pipework.compat.sync.skip.skippable import pop, skippable, stash, verify_skippables

__all__ = ["Namespace", "pop", "skippable", "stash", "verify_skippables"]
