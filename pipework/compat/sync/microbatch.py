"""Inputs that are not split."""

from pipework.microbatch import NoChunk

__all__ = ["NoChunk"]
