"""Tools for tests: the un-pipelined model as a reference for a pipe."""

from pipework.runtime.random.streams import draw_key
from pipework.testing.reference import Reference, micro_batch_random, reference_backward, reference_step

__all__ = ["Reference", "draw_key", "micro_batch_random", "reference_backward", "reference_step"]
