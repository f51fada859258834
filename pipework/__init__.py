"""Pipeline-parallel training for PyTorch.

Names are imported when they are first used, so that what needs no tensors (schedules, their pictures, the command line)
starts at once and without torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from pipework.assignment.partition import partition_model
    from pipework.attached import attach, to_sequential
    from pipework.distributed.health.errors import PipelineError
    from pipework.distributed.mesh import Mesh, init
    from pipework.integrations.pretrained import load_pretrained, save_pretrained
    from pipework.model.batchnorm import convert_deferred_batch_norm
    from pipework.model.marks import Chunk, MicroBatches, NoChunk
    from pipework.model.sequential import PipeSequential, WithDevice
    from pipework.pipe import Pipe
    from pipework.planning.balance import balance_by_size, balance_by_time
    from pipework.planning.measuring.plan_model import plan
    from pipework.planning.plan import Plan
    from pipework.runtime.host_optimizer import HostOptimizer
    from pipework.saving import Checkpoint, load_checkpoint, save_checkpoint
    from pipework.skip import pop, skippable, stash
    from pipework.tracebacks import PipeWarning

__version__ = "0.1.0"

__all__ = [
    "Pipe", "PipeSequential", "PipeWarning", "PipelineError", "attach", "to_sequential",
    "Chunk", "NoChunk", "MicroBatches", "WithDevice", "skippable", "stash", "pop",
    "partition_model", "balance_by_size", "balance_by_time", "plan", "Plan",
    "init", "Mesh", "convert_deferred_batch_norm", "HostOptimizer",
    "save_checkpoint", "load_checkpoint", "Checkpoint", "save_pretrained", "load_pretrained", "__version__",
]  # fmt: skip

_HOMES: Final = {
    "assignment.partition": ("partition_model",),
    "attached": ("attach", "to_sequential"),
    "distributed.health.errors": ("PipelineError",),
    "distributed.mesh": ("Mesh", "init"),
    "integrations.pretrained": ("load_pretrained", "save_pretrained"),
    "model.batchnorm": ("convert_deferred_batch_norm",),
    "model.marks": ("Chunk", "MicroBatches", "NoChunk"),
    "model.sequential": ("PipeSequential", "WithDevice"),
    "pipe": ("Pipe",),
    "planning.balance": ("balance_by_size", "balance_by_time"),
    "planning.measuring.plan_model": ("plan",),
    "planning.plan": ("Plan",),
    "runtime.host_optimizer": ("HostOptimizer",),
    "saving": ("Checkpoint", "load_checkpoint", "save_checkpoint"),
    "skip": ("pop", "skippable", "stash"),
    "tracebacks": ("PipeWarning",),
}


def __getattr__(name: str) -> object:
    home = next((module for module, names in _HOMES.items() if name in names), None)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    # From now on the name is found without this function.
    globals()[name] = value = getattr(import_module(f"{__name__}.{home}"), name)
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
