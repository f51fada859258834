"""Schedules for given costs and memory, found by search; never slower than those that have a name."""

from pipework_synthesis.result import Synthesis
from pipework_synthesis.synthesize import synthesize

__all__ = ["Synthesis", "synthesize"]
__version__ = "0.1.0"
