"""What a stage keeps of a micro-batch between its F and its B: the graph, or only the inputs if it is recomputed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from pipework.autograd.boundary import edge
from pipework.runtime.skips.connections import Bundle

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch import Tensor

    from pipework.autograd.boundary import Root
    from pipework.runtime.stage.recomputation import Snapshot

    # The structure of a value: a Structure, None for a single tensor, a Bundle if the pipe has skips.
    AnyStructure: TypeAlias = Any


class Inputs(NamedTuple):
    """What a recomputation needs.

    Attributes:
        leaves: the tensors that the stage has received.
        structure: around them.
        buffers: their values before the first pass.
        versions: of the leaves, before the first pass.
    """

    leaves: tuple[Tensor, ...]
    structure: AnyStructure
    buffers: Snapshot
    versions: list[int]


class Kept:
    """All that lives between the F and the B of a micro-batch, for one stage and one mini-batch.

        F      `put`; of a checkpointed micro-batch `put_inputs` instead
        R      `take_inputs`, then `put`
        B, I   `take`

    `Offload` moves to host memory what the graph of a micro-batch has saved, or the inputs that wait for a
    recomputation. The leaves of a graph stay, since layers and hooks may have these very objects. `MemoryMeter` counts
    the bytes of both, `planning.measuring.stage_copy` predicts them, and between I and W `WeightGradientStore` keeps
    what W needs.

    Args:
        has_loss: whether the first output is the loss, which the step keeps. Others are returned beside it, without
            their graph.

    Attributes:
        graphs: by micro-batch the leaves, and where the backward starts.

    Example:
        >>> import torch
        >>> kept = Kept(has_loss=True)
        >>> kept.put(0, (), [torch.ones(1)], None)
        >>> kept.micro_batches, kept.take(0), kept.micro_batches
        ({0}, ((), (None,)), set())
    """

    def __init__(self, has_loss: bool) -> None:
        self._has_loss = has_loss
        self._inputs: dict[int, Inputs] = {}
        self.graphs: dict[int, tuple[tuple[Tensor, ...], tuple[Root, ...]]] = {}

    def put(
        self, micro_batch: int, leaves: tuple[Tensor, ...], outputs: Sequence[Tensor], structure: AnyStructure
    ) -> None:
        """Keeps the graph between leaves and outputs; a backward starts at these, and where the structure says."""
        more: tuple[Root, ...] = structure.begun if type(structure) is Bundle else ()
        if self._has_loss:  # its seed is made like it
            roots: Iterable[Root] = [outputs[0] if outputs[0].requires_grad else None]
        else:
            roots = map(edge, outputs)
        self.graphs[micro_batch] = leaves, (*roots, *more)

    def put_inputs(self, micro_batch: int, inputs: Inputs) -> None:
        """Keeps no graph, but what a recomputation needs."""
        self._inputs[micro_batch] = inputs

    def take(self, micro_batch: int, *, again: bool = False) -> tuple[tuple[Tensor, ...], tuple[Root, ...]]:
        """The leaves of a graph, and where its backward starts. They stay if the backward may run `again`."""
        graph = self.graphs[micro_batch]
        if not again:
            del self.graphs[micro_batch]
        return graph

    def take_inputs(self, micro_batch: int, *, again: bool) -> Inputs | None:
        """What a recomputation needs; None: the micro-batch is not recomputed. It stays if it may be `again`."""
        return self._inputs.get(micro_batch) if again else self._inputs.pop(micro_batch, None)

    def inputs(self, micro_batch: int) -> tuple[Tensor, ...]:
        """The leaves that wait for a recomputation; none if the micro-batch is not recomputed."""
        inputs = self._inputs.get(micro_batch)
        return () if inputs is None else inputs.leaves

    @property
    def micro_batches(self) -> set[int]:
        """Those of which something is kept."""
        return {*self._inputs, *self.graphs}

    def clear(self) -> None:
        """Drops everything, after a failure."""
        self._inputs.clear()
        self.graphs.clear()
