"""Executes schedules: the one loop, stages at run time, transports, gradient buffers, failure."""
