"""The best pipeline for a model's layers, devices and memory: from a profile to a plan. It needs no tensors."""
