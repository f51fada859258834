"""Skip connections: a layer stashes a tensor, a later one pops it, and those between them need not know."""

from pipework.skip.commands import pop, stash
from pipework.skip.decorator import Skippable, skippable
from pipework.skip.namespace import Namespace, SkipKey
from pipework.skip.verify import verify_skippables

__all__ = ["Namespace", "SkipKey", "Skippable", "pop", "skippable", "stash", "verify_skippables"]
