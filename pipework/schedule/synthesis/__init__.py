"""Synthesis: schedules for given costs and memory, found by search; never slower than those that have a name."""
