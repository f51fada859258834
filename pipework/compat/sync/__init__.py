"""Stands for `torch.distributed.pipeline.sync`, which PyTorch had up to version 2.3."""

from pipework.compat.sync.checkpoint import is_checkpointing, is_recomputing
from pipework.compat.sync.microbatch import NoChunk
from pipework.compat.sync.pipe import Pipe, WithDevice

__all__ = ["NoChunk", "Pipe", "WithDevice", "is_checkpointing", "is_recomputing"]
