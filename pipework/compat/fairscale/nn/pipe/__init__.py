"""fairscale's package with its `Pipe`."""

from pipework.compat.fairscale.nn.pipe.pipe import Pipe
from pipework.compat.modules import add_submodules
from pipework.model.checkpoint import is_checkpointing, is_recomputing

__all__ = ["Pipe", "is_checkpointing", "is_recomputing"]

add_submodules(__name__)
