"""In-place changes of a stage's inputs: refused if a gradient would be wrong."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

from torch import Tensor

from pipework import torch_private
from pipework.autograd import boundary
from pipework.torch_private import counted_version, memory_of
from pipework.values.shared_memory import share_memory
from pipework.values.tensor_form import repeats_memory

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence, Set

    from pipework.autograd.aliases import Aliases
    from pipework.autograd.batch_versions import BatchVersions
    from pipework.runtime.stage.stage import Stage


class InPlaceChanges:
    """Whether the layers of a stage change its inputs in place, in one mini-batch.

    Args:
        stage: the stage.
        own_leaves: the numbers of the inputs that are leaves of the caller. The layers get views of these, so that
            PyTorch refuses an in-place operation on them. The same holds for views of them from an earlier stage.
        batch: the version counters of the inputs, if the caller may change the inputs before a backward.
        checkpointed: the micro-batches that are computed twice. Their leaves are copies, or the recomputation compares
            the versions of their leaves.
        parameters: the aliases of the stage's parameters.

    Attributes:
        found: whether the layers have changed an input in place; None before the first micro-batch, for which a
            recomputation prepares as if they did so.
        refuses: the memory of those inputs of this micro-batch that a later stage must not change in place, either.
        sent: the memory of all outputs so far, which other stages may keep.
    """

    def __init__(
        self,
        stage: Stage,
        own_leaves: frozenset[int],
        batch: BatchVersions | None,
        checkpointed: Set[int],
        parameters: Aliases,
    ) -> None:
        self._stage = stage
        self._checkpointed = checkpointed
        self._parameters = parameters
        self._own_leaves = own_leaves
        self._batch = batch
        self.found: bool | None = None
        self.refuses: Set[object] = frozenset()
        self.sent: set[object] = set()
        self._versions: list[int] = []  # of the inputs of this micro-batch; -1: not looked at
        self._passed_on: Set[int] = frozenset()  # the inputs whose memory outputs have, too

    def entered(self, leaves: Sequence[Tensor], micro_batch: int) -> tuple[Tensor, ...]:
        """What the layers get instead of the leaves: its version counters show a change afterwards."""
        refuses, entered, versions = set(), [], []
        batch = None if micro_batch in self._checkpointed else self._batch
        for number, leaf in enumerate(leaves):
            if number in self._own_leaves or boundary.is_unchangeable(leaf):
                refuses.add(memory_of(leaf))
                entered.append(boundary.view(leaf))
            else:
                entered.append(boundary.enter(leaf))
                if batch is not None and entered[-1].grad_fn is not None:
                    batch.add_alias(leaf, entered[-1])
            versions.append(-1 if leaf.requires_grad or len(leaves) == 1 else counted_version(leaf))
        self.refuses, self._versions = refuses, versions
        return tuple(entered)

    def see(self, leaves: Sequence[Tensor], entered: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
        """After the layers have run: looks whether they have changed one of these tensors, and which of them go on."""
        changed: list[Tensor] = []
        detached: list[Tensor] = []  # that were changed, too; by now such an input may require a gradient
        aliases: dict[int, Tensor] = {}
        for leaf, each, version in zip(leaves, entered, self._versions, strict=True):
            if each is not leaf:
                aliases[id(each)] = leaf
                if boundary.report_overwriting(leaf, each):
                    changed.append(leaf)
            elif version >= 0 and counted_version(leaf) != version:
                detached.append(leaf)
        for output in outputs if aliases else ():
            boundary.note_source(output, aliases)
        self.found = bool(self.found or changed)
        if detached:
            # An alias, which operators may have saved, does not count changes of a detached input of the same memory.
            self.refuse_overlap(itertools.product(detached, aliases.values()))
        if changed:
            self.refuse_overlap(itertools.combinations(leaves, 2))
            if any(repeats_memory(leaf.shape, leaf.stride()) for leaf in changed):
                raise RuntimeError(
                    f"{self._the_stage}, changed an input in place whose elements share memory, such as windows of a "
                    "tensor, so that its gradient would be wrong. Send a clone, or make the operation not in-place"
                )

    def cut(self, outputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """The outputs without their graph, with a mark on those that no later stage may change in place.

        These have the memory of a leaf of the caller, or of a parameter.
        """
        leaves = tuple(map(boundary.cut, outputs))
        for output, leaf in zip(outputs, leaves, strict=True):
            memory = memory_of(leaf)
            self.sent.add(memory)
            is_view = output.is_leaf or torch_private.viewed(output) is not None
            refuses = leaf.requires_grad and memory in self.refuses
            if refuses or (is_view and self._parameters.has_memory_of(output)):
                boundary.mark_unchangeable(leaf)
        self.refuses = frozenset()
        return leaves

    def inputs_of_first_pass(self, leaves: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """The inputs on which the first pass of a checkpointed micro-batch runs.

        The recomputation needs the inputs as they are now. So this stage must not change them in place, nor a later
        stage that gets their memory as an output of this one: such inputs are copied. The first pass may also add hooks
        to its inputs, which would act twice: all others are new leaves with the same memory.
        """
        every = self.found is not False
        return tuple(
            [
                boundary.private_copy(leaf) if every or n in self._passed_on else boundary.renewed(leaf)
                for n, leaf in enumerate(leaves)
            ]
        )

    def see_first_pass(
        self, inputs: Sequence[Tensor], versions: Sequence[int], outputs: Sequence[Tensor], *, found: bool | None
    ) -> bool:
        """After a first pass: whether it has changed its inputs in place.

        Args:
            inputs: from `inputs_of_first_pass`.
            versions: of the inputs, before.
            outputs: of the pass.
            found: the attribute, before the pass.

        Raises:
            RuntimeError: the first micro-batch's pass has changed no input. So this input, which is no copy, is lost.
        """
        if found is None:
            memories = set(map(memory_of, outputs))
            self._passed_on = {n for n, tensor in enumerate(inputs) if memory_of(tensor) in memories}
        if versions == list(map(counted_version, inputs)):
            return False
        if found is False:
            raise RuntimeError(
                f"{self._the_stage}, changed its input in place, which it did not do for the first micro-batch; "
                "checkpointing needs that input again. Clone the input in that layer, or use checkpoint='never'."
            )
        self.found = True
        return True

    def refuse_overlap(self, pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
        """One of these inputs was changed in place: raises a RuntimeError if those of a pair share memory."""
        if any(itertools.starmap(share_memory, pairs)):
            raise RuntimeError(
                f"{self._the_stage}, changed an input in place, and its inputs share memory, so that another one, or "
                "its gradient, would be wrong. Send a clone, or make the operation not in-place"
            )

    @property
    def _the_stage(self) -> str:
        return f"stage {self._stage.index}, which begins with layer {self._stage.layers[0].name!r}"
