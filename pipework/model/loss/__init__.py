"""The loss of a pipe: what its function is, how it counts, and whether it may be computed in parts."""
