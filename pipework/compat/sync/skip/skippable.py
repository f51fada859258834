"""The decorator, its commands, and the check of whole models."""

from pipework.compat.skippables import verify_skippables
from pipework.skip import Skippable, pop, skippable, stash

__all__ = ["Skippable", "pop", "skippable", "stash", "verify_skippables"]
