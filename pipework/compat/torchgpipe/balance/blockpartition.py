"""How a row of costs is cut into blocks."""

from pipework.compat.balances import solve

__all__ = ["solve"]
