"""Pipeline-parallel training for PyTorch.

Names are imported when they are first used, so that what needs no tensors (schedules, their pictures, the command line)
starts at once and without torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pipework.balance import balance_by_size, balance_by_time
    from pipework.partition import WithDevice, partition_model
    from pipework.pipe import Pipe

__version__ = "0.1.0"

__all__ = ["Pipe", "WithDevice", "balance_by_size", "balance_by_time", "partition_model", "__version__"]


def __getattr__(name: str) -> object:
    match name:
        case "Pipe":
            home = "pipework.pipe"
        case "WithDevice" | "partition_model":
            home = "pipework.partition"
        case "balance_by_size" | "balance_by_time":
            home = "pipework.balance"
        case _:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(home), name)
    globals()[name] = value  # from now on the name is found without this function
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
