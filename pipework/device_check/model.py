"""The model of a case: small layers whose kernels give the same bits each time."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor, nn

from pipework import pop, skippable, stash

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pipework.device_check.cases import Case

# The rows of a micro-batch begin at multiples of 512 bytes, as memory of CUDA's allocator does, in bfloat16 too: some
# libraries choose kernels by alignment.
WIDTH: Final = 256
OUTPUTS: Final = 16


class Delay(nn.Module):
    """Keeps the device busy on the stream that a stage computes on, forward and backward, and changes nothing."""

    def __init__(self, wait: Callable[[torch.device], None]) -> None:
        super().__init__()
        self.wait = wait

    def forward(self, x: Tensor) -> Tensor:
        """The input."""
        delayed: Tensor = _Delayed.apply(x, self.wait)  # type: ignore[no-untyped-call]
        return delayed


class _Delayed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, wait: Callable[[torch.device], None]) -> Tensor:
        ctx.wait = wait
        wait(x.device)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (gradient,) = gradients
        ctx.wait(gradient.device)
        return gradient, None


@skippable(stash=["skip"])
class Fork(nn.Module):
    """Stashes what it computes, and returns another tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Any:
        """A generator; see `pipework.skippable`."""
        y = self.linear(x)
        yield stash("skip", torch.tanh(y))
        return torch.sigmoid(y)


@skippable(pop=["skip"])
class Join(nn.Module):
    """Adds what `Fork` has stashed."""

    def forward(self, x: Tensor) -> Any:
        """A generator; see `pipework.skippable`."""
        skip = yield pop("skip")
        return x + skip.to(x.device)  # in the plain model it comes from another device


def make_model(case: Case, wait: Callable[[torch.device], None]) -> nn.Sequential:
    """The layers of a case, on the CPU: at least one for each stage.

    Args:
        case: which.
        wait: called by the layers with the device that they run on, if the case delays layers.
    """
    drop = 0.25 if case.dropout else 0.0
    blocks: list[nn.Module] = [
        nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.GELU(), nn.Dropout(drop)) for _ in range(3)
    ]
    if case.delayed == "layers":
        for block in blocks:
            block.append(Delay(wait))  # type: ignore[operator]
    head = nn.Linear(WIDTH, OUTPUTS)
    return nn.Sequential(*([Fork(), *blocks, Join()] if case.skip else blocks), head)


def balance_of(case: Case, layers: int) -> list[int]:
    """How many layers each stage has.

    Example:
        >>> from pipework.device_check.cases import CPU, Case
        >>> balance_of(Case((CPU,) * 3), 4)
        [2, 1, 1]
    """
    stages = len(case.devices)
    return [layers // stages + (stage < layers % stages) for stage in range(stages)]


def placed(model: nn.Sequential, balance: Sequence[int], devices: Sequence[torch.device]) -> nn.Sequential:
    """The same model with its layers on the devices of their stages: the plain model, which moves values itself."""
    places = [device for device, count in zip(devices, balance, strict=True) for _ in range(count)]
    for layer, device in zip(model, places, strict=True):
        layer.to(device).register_forward_pre_hook(
            lambda module, inputs, device=device: tuple(value.to(device) for value in inputs)
        )
    return model
