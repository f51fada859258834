"""Stands for those parts of `fairscale` that have to do with its `Pipe`."""

__version__ = "0.4.13"  # which it stands for
