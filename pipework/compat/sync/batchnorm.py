"""Batch norm with the running statistics of whole mini-batches."""

from pipework.model.batchnorm import DeferredBatchNorm

__all__ = ["DeferredBatchNorm"]
