"""Pipeline-parallel training for PyTorch.

Names are imported when they are first used, so that what needs no tensors (schedules, their pictures, the command line)
starts at once and without torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pipework.balance import balance_by_size, balance_by_time
    from pipework.batchnorm import DeferredBatchNorm, convert_deferred_batch_norm
    from pipework.checkpoint import is_checkpointing, is_recomputing
    from pipework.microbatch import NoChunk
    from pipework.partition import WithDevice, partition_model
    from pipework.pipe import Pipe
    from pipework.processes.errors import PipelineError
    from pipework.processes.mesh import Mesh, init
    from pipework.saving import Checkpoint, load_checkpoint, save_checkpoint
    from pipework.sequential import PipeSequential
    from pipework.skip import Namespace, pop, skippable, stash, verify_skippables

__version__ = "0.1.0"

__all__ = [
    "Pipe",
    "NoChunk",
    "PipeSequential",
    "WithDevice",
    "partition_model",
    "balance_by_size",
    "balance_by_time",
    "skippable",
    "stash",
    "pop",
    "Namespace",
    "verify_skippables",
    "DeferredBatchNorm",
    "convert_deferred_batch_norm",
    "is_checkpointing",
    "is_recomputing",
    "init",
    "Mesh",
    "save_checkpoint",
    "load_checkpoint",
    "Checkpoint",
    "PipelineError",
    "__version__",
]


def __getattr__(name: str) -> object:
    match name:
        case "Pipe":
            home = "pipework.pipe"
        case "NoChunk":
            home = "pipework.microbatch"
        case "WithDevice" | "partition_model":
            home = "pipework.partition"
        case "balance_by_size" | "balance_by_time":
            home = "pipework.balance"
        case "DeferredBatchNorm" | "convert_deferred_batch_norm":
            home = "pipework.batchnorm"
        case "is_checkpointing" | "is_recomputing":
            home = "pipework.checkpoint"
        case "init" | "Mesh":
            home = "pipework.processes.mesh"
        case "PipelineError":
            home = "pipework.processes.errors"
        case "PipeSequential":
            home = "pipework.sequential"
        case "save_checkpoint" | "load_checkpoint" | "Checkpoint":
            home = "pipework.saving"
        case "Namespace" | "pop" | "skippable" | "stash" | "verify_skippables":
            home = "pipework.skip"
        case _:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(home), name)
    globals()[name] = value  # from now on the name is found without this function
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
