"""Moves the caller's tensors to the device of the stage that reads them."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import Tensor


def moved(tensor: Tensor, device: torch.device) -> Tensor:
    """The tensor on a device, for the worker there.

    The host waits only for what goes to the CPU: an accelerator's worker waits for the caller's stream, whereas a CPU
    worker reads at once.

    Example:
        >>> import torch
        >>> moved(torch.ones(2), torch.device("cpu"))
        tensor([1., 1.])
    """
    return tensor.to(device, non_blocking=device.type != "cpu")
