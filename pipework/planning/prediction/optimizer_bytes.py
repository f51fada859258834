"""What an optimizer needs on a device: its state, and the most that its step needs beside it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from pipework.planning.prediction.storage_meter import StorageMeter
from pipework.runtime.device import is_accelerator

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch import nn


class OptimizerBytes(NamedTuple):
    """Bytes of an optimizer on one device.

    Attributes:
        states: of each list of parameters.
        step: the most that a step needs above parameters, gradients and state.
    """

    states: tuple[int, ...]
    step: int = 0


def optimizer_bytes(
    optimizer: torch.optim.Optimizer | float | None,
    stages: Sequence[Iterable[nn.Parameter]],
    device: torch.device,
) -> OptimizerBytes:
    """What an optimizer will hold on a device, from a step of a copy on the meta device, which holds no memory.

    Args:
        optimizer: of these and other parameters; it stays as it is. A number: so many numbers are kept for each
            parameter. None: there is none.
        stages: the parameters of each stage on the device.
        device: where they lie.

    Raises:
        TypeError: a copy of the optimizer cannot be made, or makes no step on the meta device.

    Example:
        >>> layer = torch.nn.Linear(8, 4, bias=False)
        >>> adam = torch.optim.Adam(layer.parameters())
        >>> cpu = torch.device("cpu")
        >>> optimizer_bytes(adam, [layer.parameters()], cpu).states, optimizer_bytes(2, [[layer.weight]], cpu).states
        ((256,), (256,))
    """
    trained = [[parameter for parameter in stage if parameter.requires_grad] for stage in stages]
    if not isinstance(optimizer, torch.optim.Optimizer):
        sizes = [sum(parameter.nbytes for parameter in stage) for stage in trained]
        return OptimizerBytes(tuple([round((optimizer or 0) * size) for size in sizes]))
    here = {id(parameter) for stage in trained for parameter in stage}
    twins: dict[int, Tensor] = {}
    groups = []
    for group in optimizer.param_groups:
        own = [parameter for parameter in group["params"] if id(parameter) in here]
        twins |= {id(parameter): _twin(parameter) for parameter in own}
        groups.append({**group, **_as_on(device, group), "params": [twins[id(parameter)] for parameter in own]})
    kind: Any = type(optimizer)
    meter = StorageMeter(torch.device("meta"))
    try:
        copy: Any = kind([group for group in groups if group["params"]]) if twins else None
        for _ in range(2 if twins else 0):  # the first step makes the state
            with meter:
                before = meter.begin()
                copy.step()
    except Exception as error:
        raise TypeError(
            f"optimizer={type(optimizer).__name__}: it could not be tried on the meta device ({error}): give a number "
            "instead, how many numbers it keeps for each parameter, such as 2 for Adam"
        ) from error
    if copy is None:
        return OptimizerBytes((0,) * len(trained))
    kept = {key: sum(_sizes(copy.state.get(twin))) for key, twin in twins.items()}
    states = [sum(kept.get(id(parameter), 0) for parameter in stage) for stage in trained]
    return OptimizerBytes(tuple(states), meter.peak - before)


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


def _sizes(state: Any) -> list[int]:
    tensors = (value for value in (state or {}).values() if isinstance(value, Tensor))
    return [tensor.nbytes for tensor in tensors if tensor.is_meta]  # a step counter lies on the CPU
