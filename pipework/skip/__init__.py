"""Skip connections: a layer stashes a tensor and a later layer pops it; the layers between them are not involved."""

from pipework.skip.decorator import Namespace, SkipKey, Skippable, pop, skippable, stash
from pipework.skip.layout import verify_skippables

__all__ = ["Namespace", "SkipKey", "Skippable", "pop", "skippable", "stash", "verify_skippables"]
