"""Trainings in several processes in which something goes wrong."""

from tests.faults.processes.launching import launch
from tests.faults.processes.training import failing

__all__ = ["failing", "launch"]
