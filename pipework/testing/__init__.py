"""Tools for tests: the un-pipelined model as a reference for a pipe, and faults on purpose.

Names are imported when they are first used: `pipework.distributed` needs the faults alone.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pipework.runtime.random.streams import draw_key
    from pipework.testing.faults import Fault, InjectedFault, fail_at
    from pipework.testing.random import micro_batch_random
    from pipework.testing.reference import Reference, reference_backward
    from pipework.testing.step import reference_step

__all__ = [
    "Fault",
    "InjectedFault",
    "Reference",
    "draw_key",
    "fail_at",
    "micro_batch_random",
    "reference_backward",
    "reference_step",
]


def __getattr__(name: str) -> object:
    match name:
        case "Fault" | "InjectedFault" | "fail_at":
            home = "pipework.testing.faults"
        case "Reference" | "reference_backward":
            home = "pipework.testing.reference"
        case "reference_step":
            home = "pipework.testing.step"
        case "micro_batch_random":
            home = "pipework.testing.random"
        case "draw_key":
            home = "pipework.runtime.random.streams"
        case _:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(home), name)
    globals()[name] = value  # from now on the name is found without this function
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
