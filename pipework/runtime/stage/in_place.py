"""In-place changes of a stage's inputs: found with the first micro-batch, refused if a gradient would be wrong."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from pipework import torch_private
from pipework.autograd import boundary

if TYPE_CHECKING:
    from collections.abc import Sequence, Set

    from pipework.autograd.batch_versions import BatchVersions
    from pipework.runtime.stage.stage import Stage


class InPlaceChanges:
    """Whether the layers of a stage change its inputs in place, in one mini-batch.

    Args:
        stage: the stage.
        own_leaves: the numbers of the inputs that are leaves of the caller. They, and views of them from an earlier
            stage, are passed to the layers as they are, so that PyTorch refuses an in-place operation on them.
        batch: of the inputs, if the caller may change them before a backward.

    Attributes:
        found: None before the first micro-batch, which is treated as if they did.
        refuses: memory of this micro-batch's inputs that a later stage must not change in place, either.
    """

    def __init__(self, stage: Stage, own_leaves: frozenset[int], batch: BatchVersions | None) -> None:
        self._stage = stage
        self._own_leaves = own_leaves
        self._batch = batch
        self.found: bool | None = None
        self.refuses: Set[object] = frozenset()
        self._passed_on: Set[int] = frozenset()  # the inputs whose memory outputs have, too

    def aliases(self, leaves: Sequence[Tensor], *, recomputed: bool) -> tuple[Tensor, ...]:
        """What the layers get instead of their inputs, so that changes can be seen afterwards.

        Args:
            leaves: the inputs.
            recomputed: whether this micro-batch is: then its leaves are copies, or looked at by the recomputation.
        """
        refusing = [n in self._own_leaves or boundary.is_unchangeable(leaf) for n, leaf in enumerate(leaves)]
        pairs = list(zip(leaves, refusing, strict=True))
        aliases = tuple([leaf if refuses else boundary.enter(leaf) for leaf, refuses in pairs])
        self.refuses = {_memory(leaf) for leaf, refuses in pairs if refuses}
        if self._batch is not None and not recomputed:
            for leaf, alias in zip(leaves, aliases, strict=True):
                if alias.grad_fn is not None:
                    self._batch.add_alias(leaf, alias)
        return aliases

    def see(self, leaves: Sequence[Tensor], aliases: Sequence[Tensor]) -> None:
        """After the layers have run on aliases of these inputs."""
        seen = [boundary.report_overwriting(leaf, alias) for leaf, alias in zip(leaves, aliases, strict=True)]
        self.found = bool(self.found) or any(seen)
        if any(seen):
            self.refuse_overlap(leaves)

    def mark(self, outputs: Sequence[Tensor]) -> None:
        """Marks the outputs that have memory of the caller's leaves, for the stages behind."""
        for output in outputs:
            if output.requires_grad and _memory(output) in self.refuses:
                boundary.mark_unchangeable(output)
        self.refuses = frozenset()

    def inputs_of_first_pass(self, leaves: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """What the first pass of a checkpointed micro-batch runs on: the recomputation needs the input as it is now.

        It must not have hooks of this pass, which would act a second time. Neither an in-place operation of this stage
        may change it, nor one of a later stage to which this one passes its memory on.
        """
        every = self.found is not False
        return tuple(
            [
                boundary.private_copy(leaf) if every or n in self._passed_on else boundary.renewed(leaf)
                for n, leaf in enumerate(leaves)
            ]
        )

    def see_first_pass(
        self, inputs: Sequence[Tensor], versions: Sequence[int], outputs: Sequence[Tensor], *, is_first: bool
    ) -> bool:
        """After a first pass: whether it has changed its inputs in place.

        Args:
            inputs: from `inputs_of_first_pass`.
            versions: of the inputs, before.
            outputs: of the pass.
            is_first: whether nothing was known before.

        Raises:
            RuntimeError: the first micro-batch's pass has not, and the input, which is no copy, is needed again.
        """
        if is_first:
            memories = set(map(_memory, outputs))
            self._passed_on = {n for n, tensor in enumerate(inputs) if _memory(tensor) in memories}
        if versions == list(map(torch_private.version, inputs)):
            return False
        if not (is_first or self.found):
            raise RuntimeError(
                f"{self._the_stage}, changed its input in place, which it did not do for the first micro-batch; "
                "checkpointing needs that input again. Clone the input in that layer, or use checkpoint='never'."
            )
        self.found = True
        return True

    def refuse_overlap(self, leaves: Sequence[Tensor]) -> None:
        """Raises a RuntimeError if some of these inputs, of which one was changed in place, share memory."""
        storages = {leaf.untyped_storage().data_ptr() for leaf in leaves}
        if len(storages) < len(leaves) and any(leaf.requires_grad for leaf in leaves):
            raise RuntimeError(
                f"{self._the_stage}, changed an input in place, and its inputs share memory, so that the gradient of "
                "another one would be wrong. Send a clone, or make the operation not in-place"
            )

    @property
    def _the_stage(self) -> str:
        return f"stage {self._stage.index}, which begins with layer {self._stage.layers[0].name!r}"


def _memory(tensor: Tensor) -> object:
    """Equal for tensors of which one may be changed with the other."""
    key = torch_private.memory_key(tensor)
    return id(tensor) if key is None else key
