"""The version counters of a mini-batch: each micro-batch has one of its own, and both sides learn of changes.

PyTorch gives all slices of a tensor one version counter. If a layer changed one micro-batch in place, the graphs of the
others would take that for a change of theirs, and refuse to be differentiated. So slices get counters of their own.
Then autograd does not see any more that the caller has changed the whole tensor, and this file tells it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch.autograd.graph import increment_version

from pipework import torch_private

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch import Tensor


class BatchVersions:
    """The caller's tensors and their slices.

    Args:
        tensors: of the mini-batch.
        slices: of each of them, which share its memory and not its version counter.

    Example:
        >>> import torch
        >>> batch = torch.zeros(4)
        >>> slices = [part.data for part in batch.split(2)]
        >>> versions = BatchVersions([batch], [slices])
        >>> _ = slices[1].add_(1)
        >>> versions.report()
        >>> batch._version, slices[0]._version
        (1, 0)
        >>> _ = batch.add_(1)
        >>> versions.spread()
        >>> slices[0]._version
        1
    """

    def __init__(self, tensors: Iterable[Tensor], slices: Iterable[Sequence[Tensor]]) -> None:
        pairs = zip(tensors, slices, strict=True)
        # What was made in inference mode has no version counter.
        self._pairs = [(tensor, parts) for tensor, parts in pairs if parts and not tensor.is_inference()]
        self._versions = self._counted()

    def add_alias(self, leaf: Tensor, alias: Tensor) -> None:
        """The graph of a micro-batch has an alias of its leaf, with a version counter of its own (`boundary.enter`).

        The leaf shares the counter of a slice, or of a whole tensor that every micro-batch gets.
        """
        self._pairs.append((leaf, (alias.detach(),)))  # shares the alias's counter, and not its graph
        self._versions += self._counted(len(self._pairs) - 1)

    def _counted(self, first: int = 0) -> list[tuple[int, list[int]]]:
        version = torch_private.version
        return [(version(tensor), list(map(version, parts))) for tensor, parts in self._pairs[first:]]

    def report(self) -> None:
        """After the layers have run: where they have changed a slice in place, the tensor has changed."""
        for (tensor, parts), (_, versions) in zip(self._pairs, self._versions, strict=True):
            if versions != list(map(torch_private.version, parts)):
                increment_version(tensor)
        self._versions = self._counted()

    def spread(self) -> None:
        """Before a backward: where the caller has changed a tensor in place, its slices and aliases have changed."""
        for (tensor, parts), (version, _) in zip(self._pairs, self._versions, strict=True):
            if version != torch_private.version(tensor):
                for part in parts:
                    increment_version(part)
        self._versions = self._counted()

    def forget(self) -> None:
        """No backward will come any more: drops the tensors."""
        self._pairs, self._versions = [], []
