"""What ranks do to gradients together: data parallelism, tied parameters, the norm, infinities."""
