"""Automatic balance: the number of consecutive layers of each partition."""

from pipework.balance.by_parameters import estimated_costs
from pipework.balance.by_size import balance_by_size
from pipework.balance.by_time import balance_by_time
from pipework.balance.minimax import minimax_partition

__all__ = ["balance_by_size", "balance_by_time", "estimated_costs", "minimax_partition"]
