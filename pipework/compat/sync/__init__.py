"""The adapter for `torch.distributed.pipeline.sync`, which PyTorch had up to version 2.3."""

from pipework.compat.modules import add_submodules
from pipework.compat.sync.no_chunk import NoChunk
from pipework.compat.sync.pipe import Pipe, WithDevice
from pipework.model.checkpoint import is_checkpointing, is_recomputing

__all__ = ["NoChunk", "Pipe", "WithDevice", "is_checkpointing", "is_recomputing"]

add_submodules(__name__)
