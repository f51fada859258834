"""A stage's backward as a callable: (leaves, roots, their gradients, micro-batch) -> the gradients of the leaves.

    leaves <--4-- autograd <--3-- roots, each with its gradient      the roots: outputs, stashed tensors, loss (1),
       |             |                                               and parameters that a later stage uses, too (2)
       |             +--5--> the .grad of the aliases of parameters
       v
    to the stage before

The gradients of parameters are added up in the aliases (see `autograd.aliases`), in the order of the backwards; those
that are deferred wait in the weight-gradient store for W. Like `StageForward` this is one attribute, which can be
wrapped, captured or replaced.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from pipework import torch_private
from pipework.autograd import boundary
from pipework.autograd.stray_gradients import explain_freed_graph
from pipework.runtime.failure import add_note

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import TypeAlias

    from torch import Tensor
    from torch.autograd.graph import GradientEdge

    from pipework.autograd.aliases import SharedMemory
    from pipework.autograd.boundary import Root
    from pipework.runtime.stage.stage_forward import EnterStream
    from pipework.runtime.stage.stage_run import StageRun

    Gradients: TypeAlias = tuple[Tensor | None, ...]
    # Of leaves, the roots, the gradients of the roots, and the number of the micro-batch.
    Backward: TypeAlias = Callable[[tuple[Tensor, ...], Sequence[Root], Gradients, int], Gradients]


class StageBackward:
    """One stage's backward, in one run.

    Args:
        run: the mini-batch on the stage.
        memory: of the gradients of its aliases.
        enter_stream: called before the backward, if random numbers may be drawn.
        retain_graph: whether the graph is left for another backward.
    """

    def __init__(
        self, run: StageRun, memory: SharedMemory, enter_stream: EnterStream | None, *, retain_graph: bool
    ) -> None:
        self._stage, self._tied, self._store = run.stage, run.tied, run.store
        self._memory = memory
        self._enter_stream = enter_stream
        self._retain_graph = retain_graph

    def __call__(
        self, leaves: tuple[Tensor, ...], roots: Sequence[Root], gradients: Gradients, micro_batch: int
    ) -> Gradients:
        """The gradients of the leaves."""
        starts: list[Tensor | GradientEdge] = []
        seeds: list[Tensor] = []
        for root, gradient in zip(roots, gradients, strict=True):  # 1
            if root is not None and gradient is not None:
                starts.append(root)
                seeds.append(gradient)
        store, tied = self._store, self._tied
        if tied is not None:
            for alias, gradient in tied.begun(micro_batch):  # 2
                starts.append(alias)
                seeds.append(gradient)
        if not starts:
            if store is not None:
                store.nothing_to_differentiate(micro_batch)
            return (None,) * len(leaves)
        if self._enter_stream is not None:
            # A backward may draw random numbers, from a stream of its own.
            self._enter_stream(-1 - self._stage.index, micro_batch)
        run, given = torch_private.run_backward, (tuple(starts), tuple(seeds), self._retain_graph)
        try:
            if store is None:
                of_leaves = boundary.gradients(leaves, run, *given)  # 3, 4, 5
            else:
                of_leaves = boundary.gradients(leaves, store.differentiate, micro_batch, partial(run, *given))
        except RuntimeError as error:
            if (text := explain_freed_graph(error, self._stage)) is not None:
                add_note(error, text)
            raise
        memory = self._memory
        if memory.pending:
            memory.separate()
        if tied is not None:
            memory.pending = [*memory.pending, *tied.hand_on(micro_batch)]  # their gradients come anew
        return of_leaves
