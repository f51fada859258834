"""Test bodies run in several processes at once."""

from tests.jobs import on_ranks, start

__all__ = ["on_ranks", "start"]
