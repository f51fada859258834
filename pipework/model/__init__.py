"""The model of a pipe: its layers, how they get memory and values, micro-batches, the loss."""
