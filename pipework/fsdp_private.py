"""Every private name of FSDP2 (`torch.distributed.fsdp.fully_shard`) that the package uses; see `torch_private`.

FSDP gathers the parameters of a layer at its forward and its backward, and reduces gradients after each backward. A
pipe does both at other times, for all micro-batches at once, and has no public way to: `unshard`, `reshard` and some
settings are public, but not the reduction by itself, nor the parameters that are whole meanwhile. If a name is gone,
layers that FSDP2 shards cannot be in a pipe: `FSDPStates` raises an ImportError with the name.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import torch

from pipework.torch_private import require

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch import Tensor, nn
    from torch.distributed.fsdp import FSDPModule


def fsdp_modules(layers: Iterable[nn.Module]) -> list[FSDPModule]:
    """The modules that FSDP2 shards, outer ones before inner ones; none as long as nobody has imported it."""
    module = sys.modules.get("torch.distributed.fsdp")
    if module is None:
        return []
    found = dict.fromkeys(each for layer in layers for each in layer.modules() if isinstance(each, module.FSDPModule))
    return list(found)


def is_fully_sharded(module: nn.Module) -> bool:
    """Whether `fully_shard` was called for this module itself."""
    return id(module) in map(id, fsdp_modules([module]))


def free_shards(layers: Iterable[nn.Module]) -> None:
    """Frees the memory of shards that FSDP keeps beside the parameters, after these were moved to the meta device."""
    for module in fsdp_modules(layers):
        for each in (each for group in _groups_of(_state_of(module)) for each in group.fsdp_params):
            require(each, "sharded_param._local_tensor _sharded_param_data")
            each._sharded_param_data = each.sharded_param._local_tensor.view(-1)


class FSDPParameter:
    """One parameter that FSDP shards.

    Args:
        private: FSDP's own object.

    Attributes:
        accumulated: the sum of gradients of the whole parameter, in the dtype in which they are reduced.
    """

    __slots__ = ("_private", "accumulated")

    def __init__(self, private: Any) -> None:
        self._private = private
        self.accumulated: Tensor | None = None

    @property
    def shard(self) -> Tensor:
        """The user's parameter, a DTensor."""
        return self._private.sharded_param  # type: ignore[no-any-return]

    @shard.setter
    def shard(self, value: Tensor) -> None:
        self._private.sharded_param = value

    @property
    def was_whole(self) -> bool:
        """Whether the whole parameter exists, with or without memory."""
        return hasattr(self._private, "_unsharded_param")

    @property
    def whole(self) -> Tensor:
        """The whole parameter, which has memory as long as it is gathered."""
        return self._private._unsharded_param  # type: ignore[no-any-return]

    @property
    def reduce_dtype(self) -> torch.dtype | None:
        """In which gradients are reduced; None: in their own."""
        return self._private.reduce_dtype  # type: ignore[no-any-return]


class FSDPStates:
    """The states of some modules, of which the outermost ones are initialised as roots.

    Args:
        modules: outer ones before inner ones.
    """

    def __init__(self, modules: Sequence[FSDPModule]) -> None:
        states = list(map(_state_of, modules))
        self._states = list(dict.fromkeys(states))
        self._has_several = False
        for state in self._states:
            require(state, "_is_root _lazy_init _modules _states_to_forward_prefetch _states_to_backward_prefetch")
            require(state, "_state_ctx.iter_forward_root _state_ctx.is_last_backward")
            if state._is_root is None and len(state._modules) > 1:  # which PyTorch refuses as a root
                self._has_several = True
            else:
                state._lazy_init()
                _look_up(state)
        self._groups = [group for state in self._states for group in _groups_of(state)]
        self._changed: list[tuple[Any, str, Any]] = []  # objects of FSDP, and what an attribute was before

    @property
    def parameters(self) -> list[FSDPParameter]:
        """All parameters of the modules."""
        return [FSDPParameter(each) for group in self._groups for each in group.fsdp_params]

    @property
    def unsupported(self) -> str:
        """The name of what a pipe cannot do, if the layers ask for it."""
        if self._has_several:
            return "several layers at once"
        for group in self._groups:
            if group.mesh_info.replicate_mesh_dim is not None:
                return "HSDP (a mesh of two dimensions)"
            if any(each.offload_to_cpu for each in group.fsdp_params):
                return "CPUOffloadPolicy"
        return ""

    def suspend(self) -> None:
        """From now on forwards and backwards neither gather nor reduce nor reshard; `resume` ends that."""
        self._set(reduces=False)

    def resume(self) -> None:
        """FSDP is as it was before."""
        while self._changed:
            owner, name, value = self._changed.pop()
            setattr(owner, name, value)

    def _change(self, owner: Any, **values: Any) -> None:
        for name, value in values.items():
            self._changed.append((owner, name, getattr(owner, name)))
            setattr(owner, name, value)

    def _set(self, *, reduces: bool) -> None:
        for group in self._groups:
            self._change(
                group,
                reduce_grads=reduces,
                all_reduce_grads=True,
                reshard_after_backward=False,
                post_forward_mesh_info=None,
            )
        for state in self._states:  # a layer that is gathered next may be on another rank; the schedule says when
            self._change(state, _states_to_forward_prefetch=[], _states_to_backward_prefetch=[])
            self._change(state._state_ctx, is_last_backward=reduces)

    def unshard(self) -> None:
        """Gathers all parameters of the modules."""
        for group in self._groups:
            group.unshard(async_op=True)
        for group in self._groups:
            group.wait_for_unshard()

    def reshard(self) -> None:
        """Frees what was gathered."""
        for group in self._groups:
            group._training_state = type(group._training_state).IDLE
            group.reshard()

    def begin_reduce(self) -> None:
        """Starts to reduce the gradients of the whole parameters into those of the shards, which exist at once."""
        self._set(reduces=True)
        try:
            for group in reversed(self._groups):
                group.post_backward()
        finally:
            self.resume()

    def finish_reduce(self) -> None:
        """Waits until the gradients of the shards are complete."""
        assert not self._changed, "gathered parameters are freed before gradients are reduced"
        self._set(reduces=True)
        try:
            for state in self._states:
                if state._is_root:
                    # PyTorch 2.15 asks who calls it; other versions do not read this.
                    state._state_ctx.manual_backward_finalization_active = False
                    state._root_post_backward_final_callback()
        finally:
            self.resume()

    def forget_order(self) -> None:
        """Drops the order of forwards, which FSDP notes for the next backward; after evaluations there is none."""
        for state in self._states:
            if state._is_root:
                state._comm_ctx.post_forward_order.clear()
        for group in self._groups:
            group._post_forward_indices.clear()

    def forget(self) -> None:
        """After a failure: drops what a forward or backward has left."""
        for state in self._states:
            if state._is_root:
                # PyTorch 2.11 has one; newer versions a list.
                state._comm_ctx.reduce_scatter_state = None
                getattr(state._comm_ctx, "reduce_scatter_states", []).clear()
                state._state_ctx.iter_forward_root = None
        self.forget_order()
        for group in self._groups:
            group._all_gather_result = None
            for each in group.fsdp_params:
                if hasattr(each, "_unsharded_param"):
                    each._unsharded_param.grad = None


def _state_of(module: FSDPModule) -> Any:
    from torch.distributed.fsdp import fully_shard

    return fully_shard.state(module)  # type: ignore[attr-defined]


def _groups_of(state: Any) -> list[Any]:
    """FSDP's groups of parameters of one call of `fully_shard`; in PyTorch 2.11 there is one, or None."""
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    require(state, "_fsdp_param_group")
    return [group for group in (state._fsdp_param_group,) if group is not None]


def _look_up(state: Any) -> None:
    """Raises an ImportError with the first name that an initialised state does not have."""
    require(state, "_root_post_backward_final_callback _comm_ctx.post_forward_order")
    for group in _groups_of(state):
        require(
            group,
            "fsdp_params unshard wait_for_unshard reshard post_backward _training_state.IDLE reduce_grads "
            "all_reduce_grads reshard_after_backward post_forward_mesh_info mesh_info.replicate_mesh_dim "
            "_post_forward_indices _all_gather_result",
        )
        for each in group.fsdp_params:
            require(each, "sharded_param reduce_dtype offload_to_cpu")
