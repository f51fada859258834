"""Stands for those parts of `fairscale` that have to do with its `Pipe`."""
