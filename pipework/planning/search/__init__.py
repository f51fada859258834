"""The search among cuts, numbers of micro-batches, schedules and orders of devices, within limits of memory."""
