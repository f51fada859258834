"""Counts the bytes that one thread's operators have in use on a device at every moment, and what an optimizer holds."""

from __future__ import annotations

import functools
import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from pipework import torch_private
from pipework.autograd.weight_split.detached_graph import tensors_among
from pipework.runtime.device import is_accelerator
from pipework.runtime.host_optimizer import HostOptimizer
from pipework.torch_private import memory_key

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch import nn

_BLOCK = 512  # bytes; the allocators of accelerators round up to it


class StorageMeter(torch_private.DispatchMode):  # type: ignore[misc]
    """Counts the storages that operators make on a device while the mode is entered, and those that are freed since.

    It works on every device, also on the meta device, and changes no counter of an allocator. What an operator needs
    for itself, such as a workspace of cuDNN, is seen where the allocator counts what it has freed (CUDA's does). What a
    library keeps from then on, as cuBLAS does for each thread and stream, does not count.

    Args:
        device: storages on other devices do not count.
        present: tensors made before; their storages do not count.

    Attributes:
        live: bytes in use now.
        peak: the most since `begin`.
        mean: over the operators since `begin`.

    Example:
        >>> import torch
        >>> meter = StorageMeter(torch.device("cpu"))
        >>> with meter:
        ...     x = torch.zeros(256)
        ...     y = (x + 1).sum()
        >>> meter.live, meter.peak
        (1028, 2052)
    """

    def __init__(self, device: torch.device, present: Iterable[Tensor] = ()) -> None:
        super().__init__()
        self._device = device
        self._sizes: dict[int, tuple[int, weakref.ref[torch.UntypedStorage]]] = {}
        self._not_counted = list(present)  # kept, so that no other storage gets one of their addresses
        self._present = {memory_key(tensor) for tensor in self._not_counted}
        self.live = self.peak = self._sum = self._operators = 0

    @property
    def mean(self) -> int:
        """The mean of the bytes in use over the operators since `begin`."""
        return self._sum // max(1, self._operators)

    def begin(self) -> int:
        """The peak begins at what is in use now, which is returned."""
        self.peak = self.live
        self._sum = self._operators = 0
        return self.live

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Runs an operator, and counts what it has made."""
        before = self._freed_so_far()
        result = func(*args, **(kwargs or {}))
        temporary = self._freed_so_far() - before
        self._operators += 1
        self._sum += self.live
        made = {memory_key(tensor): tensor for tensor in tensors_among(result) if tensor.device == self._device}
        if new := made.keys() - self._sizes.keys() - self._present - {None}:
            # A view of a tensor that is not known, such as a constant of a layer, makes nothing.
            given = {memory_key(tensor) for tensor in tensors_among((args, tuple((kwargs or {}).values())))}
            for key in new - given:
                self._count(key, made[key].untyped_storage())
        self.peak = max(self.peak, self.live + temporary)
        return result

    def _freed_so_far(self) -> int:
        stats = torch.accelerator.memory_stats(self._device) if is_accelerator(self._device) else {}
        return int(stats.get("allocated_bytes.all.freed", 0))

    def _count(self, key: Any, storage: torch.UntypedStorage) -> None:
        size = in_blocks(storage.nbytes(), self._device)
        # What is counted must not keep the meter alive, which keeps tensors.
        self._sizes[key] = size, weakref.ref(storage, functools.partial(_free, weakref.ref(self), key))
        self.live += size


def in_blocks(size: int, device: torch.device) -> int:
    """The bytes that a device's allocator gives for so many."""
    return -(-size // _BLOCK) * _BLOCK if is_accelerator(device) else size


def _free(meter: weakref.ref[StorageMeter], key: int, _: object) -> None:
    if (counting := meter()) is not None:
        counting.live -= counting._sizes.pop(key)[0]


def optimizer_bytes(
    optimizer: torch.optim.Optimizer | float | None,
    stages: Sequence[Iterable[nn.Parameter]],
    device: torch.device,
) -> tuple[list[int], int]:
    """What an optimizer will hold on a device, from a step of a copy on the meta device, which holds no memory.

    Args:
        optimizer: of these and other parameters; it stays as it is. A number: so many numbers are kept for each
            parameter. None: there is none.
        stages: the parameters of each stage on the device.
        device: where they lie.

    Returns:
        The bytes of the state of each stage, and the most that a step needs above parameters, gradients and state.

    Raises:
        TypeError: a copy of the optimizer cannot be made, or makes no step on the meta device.

    Example:
        >>> layer = torch.nn.Linear(8, 4, bias=False)
        >>> adam = torch.optim.Adam(layer.parameters())
        >>> cpu = torch.device("cpu")
        >>> optimizer_bytes(adam, [layer.parameters()], cpu)[0], optimizer_bytes(2, [[layer.weight]], cpu)[0]
        ([256], [256])
    """
    trained = [[parameter for parameter in stage if parameter.requires_grad] for stage in stages]
    if not isinstance(optimizer, torch.optim.Optimizer):
        return [round((optimizer or 0) * sum(parameter.nbytes for parameter in stage)) for stage in trained], 0
    here = {id(parameter) for stage in trained for parameter in stage}
    twins: dict[int, Tensor] = {}
    groups = []
    for group in optimizer.param_groups:
        own = [parameter for parameter in group["params"] if id(parameter) in here]
        twins |= {id(parameter): _twin(parameter) for parameter in own}
        if own:
            groups.append({**group, **_as_on(device, group), "params": [twins[id(parameter)] for parameter in own]})
    if not groups:
        return [0] * len(trained), 0
    kind: Any = type(optimizer.optim if isinstance(optimizer, HostOptimizer) else optimizer)
    meter = StorageMeter(torch.device("meta"))
    try:
        copy = kind(groups)
        for _ in range(2):  # the first step makes the state
            with meter:
                before = meter.begin()
                copy.step()
    except Exception as error:
        raise TypeError(
            f"optimizer={kind.__name__}: it could not be tried on the meta device ({error}): give a number instead, "
            "how many numbers it keeps for each parameter, such as 2 for Adam"
        ) from error
    kept = {
        key: sum(each.nbytes for each in copy.state.get(twin, {}).values() if isinstance(each, Tensor) and each.is_meta)
        for key, twin in twins.items()
    }  # without a step counter, which lies on the CPU
    return [sum(kept.get(id(parameter), 0) for parameter in stage) for stage in trained], meter.peak - before


def _twin(parameter: Tensor) -> Tensor:
    twin = torch.empty_like(parameter, device="meta").detach().requires_grad_()
    twin.grad = torch.empty_like(twin, requires_grad=False)
    return twin


def _as_on(device: torch.device, group: dict[str, Any]) -> dict[str, Any]:
    """The settings with which a step on the meta device needs what it needs on this one."""
    chosen: dict[str, Any] = {name: False for name in ("fused", "capturable") if group.get(name)}
    if "foreach" in group and group["foreach"] is None:  # PyTorch's choice
        chosen["foreach"] = is_accelerator(device) and not group.get("fused") and not group.get("differentiable")
    return chosen
