"""Pipeline-parallel training for PyTorch.

Names are imported when they are first used, so that what needs no tensors (schedules, their pictures, the command line)
starts at once and without torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pipework.assignment.partition import partition_model
    from pipework.attached import attach, to_sequential
    from pipework.distributed.health.errors import PipelineError, exit_code
    from pipework.distributed.mesh import Mesh, init
    from pipework.integrations.pretrained import load_pretrained, save_pretrained
    from pipework.model.batchnorm import DeferredBatchNorm, convert_deferred_batch_norm
    from pipework.model.checkpoint import is_checkpointing, is_recomputing
    from pipework.model.marks import Chunk, MicroBatches, NoChunk
    from pipework.model.sequential import PipeSequential, WithDevice
    from pipework.pipe import Pipe
    from pipework.pipe_warning import PipeWarning
    from pipework.planning.balance import balance_by_size, balance_by_time
    from pipework.planning.measuring.plan_model import plan
    from pipework.planning.plan import Plan
    from pipework.runtime.random.shards import draw_per_rank
    from pipework.saving import Checkpoint, load_checkpoint, save_checkpoint
    from pipework.skip import Namespace, pop, skippable, stash, verify_skippables

__version__ = "0.1.0"

__all__ = [
    "Pipe",
    "attach",
    "to_sequential",
    "Chunk",
    "NoChunk",
    "MicroBatches",
    "PipeSequential",
    "WithDevice",
    "partition_model",
    "balance_by_size",
    "balance_by_time",
    "plan",
    "Plan",
    "skippable",
    "stash",
    "pop",
    "Namespace",
    "verify_skippables",
    "DeferredBatchNorm",
    "convert_deferred_batch_norm",
    "is_checkpointing",
    "is_recomputing",
    "draw_per_rank",
    "init",
    "Mesh",
    "save_checkpoint",
    "load_checkpoint",
    "Checkpoint",
    "save_pretrained",
    "load_pretrained",
    "PipelineError",
    "PipeWarning",
    "exit_code",
    "__version__",
]


def __getattr__(name: str) -> object:
    homes = {
        "pipework.attached": ("attach", "to_sequential"),
        "pipework.distributed.health.errors": ("PipelineError", "exit_code"),
        "pipework.distributed.mesh": ("Mesh", "init"),
        "pipework.integrations.pretrained": ("load_pretrained", "save_pretrained"),
        "pipework.model.batchnorm": ("DeferredBatchNorm", "convert_deferred_batch_norm"),
        "pipework.model.checkpoint": ("is_checkpointing", "is_recomputing"),
        "pipework.model.marks": ("Chunk", "MicroBatches", "NoChunk"),
        "pipework.model.sequential": ("PipeSequential", "WithDevice"),
        "pipework.pipe": ("Pipe",),
        "pipework.pipe_warning": ("PipeWarning",),
        "pipework.planning.balance": ("balance_by_size", "balance_by_time"),
        "pipework.planning.plan": ("Plan",),
        "pipework.planning.measuring.plan_model": ("plan",),
        "pipework.assignment.partition": ("partition_model",),
        "pipework.runtime.random.shards": ("draw_per_rank",),
        "pipework.saving": ("Checkpoint", "load_checkpoint", "save_checkpoint"),
        "pipework.skip": ("Namespace", "pop", "skippable", "stash", "verify_skippables"),
    }
    home = next((module for module, names in homes.items() if name in names), None)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = import_module(home)
    # From now on they are found without this function: all of them, as one has the name of its module.
    globals().update({each: getattr(module, each) for each in homes[home]})
    return globals()[name]


def __dir__() -> list[str]:
    return sorted(__all__)
