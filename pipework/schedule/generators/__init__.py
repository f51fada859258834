"""Generators: functions from numbers of workers and micro-batches to schedules, one family in each file."""
