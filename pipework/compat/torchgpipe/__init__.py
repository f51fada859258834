"""Stands for `torchgpipe`."""

from pipework.compat.torchgpipe.checkpoint import is_checkpointing, is_recomputing
from pipework.compat.torchgpipe.gpipe import GPipe

__all__ = ["GPipe", "is_checkpointing", "is_recomputing"]

__version__ = "0.0.7"  # which it stands for
