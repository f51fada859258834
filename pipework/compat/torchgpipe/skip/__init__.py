"""Skip connections."""

from pipework.compat.torchgpipe.skip.namespace import Namespace
from pipework.compat.torchgpipe.skip.skippable import pop, skippable, stash, verify_skippables

__all__ = ["Namespace", "pop", "skippable", "stash", "verify_skippables"]
