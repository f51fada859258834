"""Has `Pipe`."""

from pipework.compat.fairscale.nn.pipe.checkpoint import is_checkpointing, is_recomputing
from pipework.compat.fairscale.nn.pipe.pipe import Pipe

__all__ = ["Pipe", "is_checkpointing", "is_recomputing"]
