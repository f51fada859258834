"""The best pipeline for a model's layers, devices and memory.

Copies of a model's layers are measured, for its profile or to predict a step of a pipe. The search for a plan needs the
profile only, and no tensors. Names are imported when they are first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pipework.assignment.minimax import minimax_partition
    from pipework.assignment.partition import estimated_costs
    from pipework.planning.layer_costs import LinkSpeed
    from pipework.planning.measuring.profile import profile
    from pipework.planning.measuring.rates import Rates
    from pipework.planning.profiles import Profile

__all__ = ["profile", "Profile", "Rates", "LinkSpeed", "estimated_costs", "minimax_partition"]


def __getattr__(name: str) -> object:
    homes = {
        "profile": "pipework.planning.measuring.profile",
        "Profile": "pipework.planning.profiles",
        "Rates": "pipework.planning.measuring.rates",
        "LinkSpeed": "pipework.planning.layer_costs",
        "estimated_costs": "pipework.assignment.partition",
        "minimax_partition": "pipework.assignment.minimax",
    }
    if name not in homes:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(homes[name]), name)
