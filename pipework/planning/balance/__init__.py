"""Automatic balance: the number of consecutive layers of each partition, by their measured time or memory."""
