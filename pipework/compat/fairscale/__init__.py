"""The adapter for the parts of `fairscale` that belong to its `Pipe`."""

__version__ = "0.4.13"  # of the fairscale that it replaces
