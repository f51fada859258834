"""Gradients that several ranks share: data parallelism, tied parameters, the norm for clipping, overflows."""
