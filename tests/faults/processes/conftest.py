"""Trainings in several processes in which something goes wrong."""

from tests.faults.processes.launching import launch
from tests.faults.processes.training import failing
from tests.jobs import on_ranks, start

__all__ = ["failing", "launch", "on_ranks", "start"]
