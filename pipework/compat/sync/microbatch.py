"""Inputs that are not split."""

from pipework.model.microbatch import NoChunk

__all__ = ["NoChunk"]
