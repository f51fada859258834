"""Which gradients of a rank are averaged over which replicas, in one step.

    most parameters                              over all replicas
    local over some dimensions, or a DTensor     over the replicas that have the same; see `SharedTensors`
    a parameter that only this rank has          divided by the number of replicas
    what FSDP shards                             reduced by FSDP, see `FullySharded`

The loss is the mean of the replicas' losses. A parameter that one rank alone has was used by the rows of all replicas,
so its gradient is already the sum, and is divided. Of one that several ranks have, each has the gradient of some rows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from contextlib import AbstractContextManager

    from torch import Tensor

    from pipework.autograd.aliases import Aliases
    from pipework.autograd.fully_sharded import FullySharded
    from pipework.distributed.gradients.data_parallel import DataParallel
    from pipework.distributed.shared_tensors import SharedTensors
    from pipework.runtime.run_spec import RunSpec


class Averaging:
    """The averages of the gradients of one rank.

    Args:
        every: the groups of replicas over which gradients are averaged; the first has all. Empty: there is one replica.
        tensors: of this rank.
        waits: a context in which the rank waits for others.
        gathers_in_order: whether FSDP gathers weights in an order that depends on the number of micro-batches.
    """

    def __init__(
        self,
        every: Sequence[DataParallel],
        tensors: SharedTensors,
        waits: Callable[[], AbstractContextManager[object]],
        *,
        gathers_in_order: bool,
    ) -> None:
        self._every = every
        self._tensors = tensors
        self._waits = waits
        self._gathers_in_order = gathers_in_order

    def compare(self, spec: RunSpec, delivered: int) -> None:
        """At the beginning of a step: begins to compare what the replicas train.

        Args:
            spec: of the step.
            delivered: see `DeliveredLosses.marks`.
        """
        trained = [each for run in spec.runs.values() for each in run.aliases.parameters]
        for replicas in self._every:
            compared = [each for each in trained if self._tensors.is_compared(each, replicas.ranks)]
            replicas.compare(compared, delivered)

    def needs_equal_counts(self, spec: RunSpec) -> bool:
        """Whether all replicas must have as many micro-batches: they may call collectives for each."""
        runs = spec.runs.values()
        if not self._every:
            return False
        if self._gathers_in_order and any(run.sharded is not None for run in runs):
            return True
        exchange = self._tensors.any_are_local or any(self._in_parts(run.aliases) for run in runs)
        return spec.differentiates and exchange

    def refuse_other_counts(self, micro_batches: int) -> None:
        """Raises a ValueError on all replicas if they have other numbers of micro-batches."""
        with self._waits():
            lowest, highest = self._every[0].extremes_of(micro_batches)
        if lowest != highest:
            raise ValueError(
                f"the replicas have {lowest} to {highest} micro-batches, and whole_stages, or layers with "
                "local_parameters or with DTensors over the replicas, need as many on each: give all mini-batches of "
                "one size, such as by pipe.sampler(dataset, drop_last=True)"
            )

    def begin(self, spec: RunSpec, stage: int) -> None:
        """Begins to average the gradients of a stage, which are complete."""
        every, aliases = self._every, spec.runs[stage].aliases
        if aliases.sharded is not None:
            self._begin_sharded(spec, aliases, aliases.sharded)
        if not every:
            return
        self._complete_parts(aliases)
        shared: dict[tuple[int, ...], list[Tensor]] = {each.ranks: [] for each in every}
        for parameter, leaf in _not_of_fsdp(aliases):
            if ranks := self._tensors.averaged_over(parameter):
                shared[ranks].append(leaf)
            elif leaf.grad is not None:
                leaf.grad.div_(len(every[0].ranks))
        with self._waits():  # the first time in a step for what the other replicas train
            for replicas in every:
                replicas.begin(shared[replicas.ranks])

    def finish(self, spec: RunSpec) -> None:
        """After the last action: waits for all averages."""
        _finish_sharded(spec)
        if spec.differentiates:
            for replicas in self._every:
                replicas.finish()

    def _complete_parts(self, aliases: Aliases) -> None:
        """Gives zeros to a part of a gradient that no row has come to, if other replicas have theirs.

        Either all parts of a DTensor have a gradient or none: the ranks that have them take its norm together.
        """
        leaves = self._in_parts(aliases)
        if leaves:
            with self._waits():
                present = self._every[0].begin_any_of_each([leaf.grad is not None for leaf in leaves])()
            for leaf, wanted in zip(leaves, present, strict=True):
                if wanted and leaf.grad is None:
                    leaf.grad = torch.zeros_like(leaf)

    def _in_parts(self, aliases: Aliases) -> list[Tensor]:
        """The leaves of DTensors of which replicas have different parts, but for those of FSDP."""
        if aliases.dtensor is None:  # as mostly
            return []
        return [leaf for parameter, leaf in _not_of_fsdp(aliases) if self._tensors.in_parts(parameter)]

    def _begin_sharded(self, spec: RunSpec, aliases: Aliases, sharded: FullySharded) -> None:
        present = sharded.present(aliases.parameters, aliases.leaves)
        with self._waits():
            _finish_sharded(spec)  # of an earlier stage: one holds buffers at a time
            wanted = self._every[0].begin_any_of_each(present) if self._every else lambda: present
            sharded.begin_reduce(aliases.parameters, aliases.leaves, wanted)


def _not_of_fsdp(aliases: Aliases) -> Iterator[tuple[Tensor, Tensor]]:
    """The parameters that FSDP does not shard, with their leaves."""
    for parameter, leaf in zip(aliases.parameters, aliases.leaves, strict=True):
        if aliases.sharded is None or not aliases.sharded.has(parameter):
            yield parameter, leaf


def _finish_sharded(spec: RunSpec) -> None:
    """Waits for the gradients of shards that are being reduced."""
    for run in spec.runs.values():
        gradients = None if run.sharded is None else run.sharded.finish_reduce()
        if gradients is not None:
            run.aliases.set_reduced(gradients)
