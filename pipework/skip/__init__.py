"""Skip connections: a layer stashes a tensor and a later layer pops it; the layers between them are not involved."""

from pipework.skip.commands import pop, stash
from pipework.skip.decorator import Skippable, skippable
from pipework.skip.namespace import Namespace, SkipKey
from pipework.skip.verify import verify_skippables

__all__ = ["Namespace", "SkipKey", "Skippable", "pop", "skippable", "stash", "verify_skippables"]
