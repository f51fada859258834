"""Has `Pipe`."""

from pipework.compat.fairscale.nn.pipe import Pipe

__all__ = ["Pipe"]
