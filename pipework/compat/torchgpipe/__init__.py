"""The adapter for `torchgpipe`."""

from pipework.compat.modules import add_submodules
from pipework.compat.torchgpipe.gpipe import GPipe
from pipework.model.checkpoint import is_checkpointing, is_recomputing

__all__ = ["GPipe", "is_checkpointing", "is_recomputing"]

__version__ = "0.0.7"  # of the torchgpipe that it replaces

add_submodules(__name__)
