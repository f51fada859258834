"""Automatic balance, for `partition_model`."""

from pipework.balance import balance_by_size, balance_by_time

__all__ = ["balance_by_size", "balance_by_time"]
