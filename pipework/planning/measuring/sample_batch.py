"""The mini-batch of a measurement, in micro-batches of any size, cut as a pipe cuts it."""

from __future__ import annotations

import copy
import functools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from pipework.model import mini_batch
from pipework.model.loss.settings import LossSettings
from pipework.model.marks import NO_ROWS, MicroBatches, has_micro_batches, in_micro_batches
from pipework.model.sequential import TupleRule, tuple_rule
from pipework.planning.measuring.stage_copy import Sample
from pipework.runtime.stage.loss import InnerLoss
from pipework.values import nested
from pipework.values.tensor_form import bytes_of

if TYPE_CHECKING:
    from pipework.model.marks import OwnSplit
    from pipework.model.mini_batch import MiniBatch

_CPU = torch.device("cpu")


@dataclass(frozen=True)
class SampleBatch:
    """A mini-batch and its loss.

    Attributes:
        inputs: positional arguments of the first layer.
        keywords: its keyword arguments.
        target: of the loss; None: the loss is not measured.
        loss_fn: computes it; None: the last layer does.
        tuples: the rule for tuples between layers.
        split: cuts it, see `Pipe`; None: it is cut along the rows of its tensors, or its caller has cut it.
        device: of the targets.
    """

    inputs: tuple[Any, ...]
    keywords: dict[str, Any]
    target: Any
    loss_fn: Any
    tuples: TupleRule
    split: OwnSplit | None = None
    device: torch.device = _CPU

    @classmethod
    def of(
        cls,
        module: nn.Sequential,
        sample: Any,
        keywords: Mapping[str, Any] | None,
        target: Any,
        loss_fn: Any,
        split: OwnSplit | None = None,
    ) -> SampleBatch:
        """What the caller gave for a module; a tuple is spread into positional arguments.

        Raises:
            TypeError: there is no tensor in the sample or target, or another argument has a wrong type.
            ValueError: the module has no layer, one of target and loss function is missing, or the sample cannot be
                split, or has no rows.
        """
        if not len(module):
            raise ValueError("the module has no layers, so there is nothing to measure")
        last = list(module)[-1]
        of_layer = target is not None and loss_fn is None and not TupleRule.BY_SIGNATURE.keeps_whole(last)
        if (target is None) != (loss_fn is None) and not of_layer:
            raise ValueError(
                f"got {'loss_fn= and no target=' if target is None else 'target= and no loss_fn='}: give both, or none "
                f"of them, or a target and a last layer (here {type(last).__name__}) that takes it after its input and "
                "returns the loss"
            )
        if not (target is None or isinstance(target, MicroBatches) or nested.flatten(target)[0]):
            raise TypeError(f"target is {target!r}: wanted a tensor, or several")
        inputs = sample if isinstance(sample, tuple) else (sample,)
        LossSettings(loss_fn)  # raises an error for what is no loss function
        # Calls of a copy change nothing in a loss function that is a module.
        loss_fn = copy.deepcopy(loss_fn) if isinstance(loss_fn, nn.Module) else loss_fn
        found = cls(inputs, dict(keywords or {}), target, loss_fn, tuple_rule(module), split)
        if not found.rows:
            raise ValueError("the sample has no rows: give the inputs of a mini-batch")
        return found

    @functools.cached_property
    def rows(self) -> int:
        """Of the mini-batch; those of a `split` are its smallest micro-batches, such as packed sequences."""
        if self.split is None:
            return sum(1 if rows == NO_ROWS else rows for rows in self._cut(1)[0].rows)
        sizes = [size for tensor in nested.flatten((self.inputs, self.keywords))[0] for size in tensor.shape[:2]]
        return len(self._cut(max(sizes))[0].rows)

    @property
    def made(self) -> int | None:
        """How many micro-batches the caller has made; None: the batch may be cut into any number."""
        return len(self._cut(1)[0].rows) if has_micro_batches(self.inputs, self.keywords) else None

    def _cut(self, chunks: int) -> tuple[MiniBatch, Any]:
        """The mini-batch and its target, in micro-batches as they are made by the caller or by `split`."""
        call = self.inputs, self.keywords, self.target
        if self.split is not None:
            call = in_micro_batches(self.split, *call, chunks)
        return mini_batch.split(*call[:2], chunks), call[2]

    def on(self, device: torch.device) -> SampleBatch:
        """With targets, and a loss whose tensors are, on a device; inputs are copied to wherever layers run."""
        loss = self.loss_fn.to(device) if isinstance(self.loss_fn, nn.Module) else self.loss_fn
        return replace(self, loss_fn=loss, device=device)

    def micro_batches(self, rows: int) -> MiniBatch:
        """The mini-batch in micro-batches of so many rows, the last one with what is left, or as the caller cut it."""
        split, target = self._cut(1 if self.split is None else -(-self.rows // rows))
        if split.is_cut:
            full, left = divmod(self.rows, rows)
            sizes = [rows] * full + [left] * (left > 0)
            whole, ((_, structure),) = split, split.micro_batches
            split = mini_batch.MiniBatch.of(
                whole.tensors, tuple([each and sizes for each in whole.pieces.sizes]), structure, dims=whole.pieces.dims
            )
        if target is not None:
            split.cut_target(target, self.device)
            # Weights of micro-batches depend on what targets hold, and the time of a product does not.
            count = len(split.micro_batches)
            split.loss = InnerLoss(self.loss_fn, (1.0,) * count, micro_batches=count)
        return split

    def sample(self, rows: int) -> Sample:
        """The largest micro-batch of so many rows; see `micro_batches`."""
        return largest_sample(self.micro_batches(rows), self.tuples)


def largest_sample(batch: MiniBatch, tuples: TupleRule) -> Sample:
    """The micro-batch with the most bytes; `tuples` says how a tuple goes from one layer to the next."""
    sizes = [sum(map(bytes_of, tensors)) for tensors, _ in batch.micro_batches]
    largest = sizes.index(max(sizes))
    arguments, keywords = mini_batch.arguments_of(batch.micro_batches[largest])
    target = None if batch.targets is None else nested.unflatten(*batch.targets[largest])
    return Sample(arguments, keywords, batch.loss, target, tuples)
