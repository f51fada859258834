"""Groups layers into partitions before a `Pipe` wraps them."""

from pipework.partition import partition_model

__all__ = ["partition_model"]
