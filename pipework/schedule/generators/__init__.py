"""Generators: functions from numbers of workers and micro-batches to schedules, one family in each file.

Each returns a schedule with the name that it has in `SCHEDULES`. It raises a TypeError if a number is not an int, and a
ValueError if one is less than 1, or if the costs are for another number of stages.
"""
