"""Layers that FSDP2 shards (`torch.distributed.fsdp.fully_shard`): gathered for a stretch of work, reduced once.

    between steps     slot: the shard, a DTensor                  the user's parameter, with its .grad and hooks
    gathered          slot: FSDP's whole parameter
    in the run        slot: an alias of the whole parameter       .grad: the stage's buffer, as of every parameter
    REDUCE_GRAD       the buffer begins to be reduced             a shard, which the stage's node hands to the parameter
    resharded         slot: the shard                             the memory of the whole is free

A reduction ends before the next one of the same worker begins, or with the step.

FSDP's own hooks run with each micro-batch, and neither gather nor reduce. Rajbhandari et al., "ZeRO: Memory
Optimizations Toward Training Trillion Parameter Models", SC 2020, describes the sharding of parameters.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from pipework.fsdp_private import FSDPStates, fsdp_modules

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from typing import Self

    from torch import Tensor, nn
    from torch.distributed.fsdp import FSDPModule

    from pipework.fsdp_private import FSDPParameter


class FullySharded:
    """What FSDP shards of one stage, in one mini-batch.

    Args:
        modules: that FSDP shards, outer ones before inner ones.

    Attributes:
        is_whole: whether the parameters are gathered.

    Raises:
        ValueError: FSDP does for them what a pipe cannot do.
    """

    def __init__(self, modules: Sequence[FSDPModule]) -> None:
        self._states = FSDPStates(modules)
        if unsupported := self._states.unsupported:
            raise ValueError(
                f"fully_shard was called with {unsupported}, which layers of a pipe cannot have: call "
                "fully_shard(layer, mesh=mesh['dp']) for each layer, with a mixed precision policy if wanted"
            )
        self.is_whole = False
        # The gradient of each shard, by the id of its leaf, and whether they are wanted.
        self._reduction: tuple[list[tuple[int, Tensor | None]], Callable[[], Sequence[bool]]] | None = None
        parameters = self._states.parameters
        if not all(each.was_whole for each in parameters):
            self.gather()  # whole parameters exist from the first time on
            self.reshard()
        self._by_shard = {id(each.shard): each for each in parameters}

    @classmethod
    def of(cls, layers: Iterable[nn.Module]) -> Self | None:
        """What FSDP shards of these layers; None: nothing."""
        modules = fsdp_modules(layers)
        return cls(modules) if modules else None

    @property
    def parameters(self) -> list[Tensor]:
        """The shards."""
        return [each.shard for each in self._by_shard.values()]

    @property
    def is_reducing(self) -> bool:
        """Whether a reduction has begun that was not waited for."""
        return self._reduction is not None

    def has(self, parameter: Tensor) -> bool:
        """Whether FSDP shards a parameter."""
        return id(parameter) in self._by_shard

    def whole(self, parameter: Tensor) -> Tensor:
        """What is in the place of a shard while it is gathered."""
        return self._by_shard[id(parameter)].whole

    def gather(self) -> None:
        """Makes all parameters of the stage whole. The ranks among which they are sharded call this together."""
        if not self.is_whole:
            self._states.suspend()
            try:
                with torch.inference_mode(False):  # whole parameters, which are made once, are trained later
                    self._states.unshard()
            except BaseException:
                self._states.resume()
                raise
            self.is_whole = True

    def reshard(self) -> None:
        """Frees what was gathered."""
        if self.is_whole:
            self._states.reshard()
            self._states.forget_order()
            self._states.resume()
            self.is_whole = False

    def accumulate(self, parameters: Iterable[Tensor], leaves: Iterable[Tensor]) -> None:
        """After the backward of a micro-batch: sums over micro-batches are formed in the dtype of the reduction.

        Args:
            parameters: of the stage.
            leaves: for each of them the tensor with its gradient in `.grad`.
        """
        for _, leaf, each in self._among(parameters, leaves):
            if leaf.grad is None or each.reduce_dtype in (None, leaf.dtype):
                continue
            gradient, leaf.grad = leaf.grad, None
            if each.accumulated is None:
                each.accumulated = gradient.to(each.reduce_dtype)
            else:
                each.accumulated += gradient

    def present(self, parameters: Iterable[Tensor], leaves: Iterable[Tensor]) -> list[bool]:
        """Whether each sharded one among these parameters has a gradient."""
        found = self._among(parameters, leaves)
        return [each.accumulated is not None or leaf.grad is not None for _, leaf, each in found]

    def begin_reduce(
        self, parameters: Sequence[Tensor], leaves: Sequence[Tensor], wanted: Callable[[], Sequence[bool]]
    ) -> None:
        """Begins to reduce the gradients of the whole parameters; each rank gets that of its shard.

        Args:
            parameters: of the stage.
            leaves: for each of them the tensor with its gradient in `.grad`, which is taken.
            wanted: says in the end, for each sharded one, whether any rank has a gradient of it.
        """
        sharded = self._among(parameters, leaves)
        self.reshard()
        try:
            for parameter, leaf, each in sharded:
                gradient = leaf.grad if each.accumulated is None else each.accumulated
                if gradient is None:
                    gradient = torch.zeros_like(leaf, dtype=each.reduce_dtype)
                each.whole.grad_dtype = gradient.dtype
                each.whole.grad, each.accumulated, leaf.grad = gradient, None, None
                # FSDP adds to the gradient of the shard, and calls its hooks. That comes with the user's backward.
                each.shard = parameter.detach().requires_grad_()
            self._states.begin_reduce()
            found = [(id(leaf), each.shard.grad) for _, leaf, each in sharded]
        finally:
            for parameter, _, each in sharded:
                each.shard = parameter
        self._reduction = found, wanted

    def finish_reduce(self) -> dict[int, Tensor] | None:
        """Waits for the reduction that was begun.

        Returns:
            The gradients of shards, by the id of the leaf, but for parameters of which no rank has a gradient. None:
            there was no reduction.
        """
        if self._reduction is None:
            return None
        (found, wanted), self._reduction = self._reduction, None
        self._states.finish_reduce()
        return {
            leaf: gradient
            for (leaf, gradient), comes in zip(found, wanted(), strict=True)
            if comes and gradient is not None
        }

    def _among(
        self, parameters: Iterable[Tensor], leaves: Iterable[Tensor]
    ) -> list[tuple[Tensor, Tensor, FSDPParameter]]:
        """The parameters among these that FSDP shards, with their leaves."""
        pairs = zip(parameters, leaves, strict=True)
        return [(parameter, leaf, self._by_shard[id(parameter)]) for parameter, leaf in pairs if self.has(parameter)]

    def forget(self) -> None:
        """After a failure."""
        self._reduction = None
        self._states.forget()
