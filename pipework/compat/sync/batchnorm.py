"""Batch norm with the running statistics of whole mini-batches."""

from pipework.batchnorm import DeferredBatchNorm

__all__ = ["DeferredBatchNorm"]
