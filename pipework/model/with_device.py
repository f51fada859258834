"""A wrapper that sets the device of a layer."""

import torch
from torch import nn

Device = torch.device | str | int


class WithDevice(nn.Module):
    """Sets the device of a layer, in particular of a layer without parameters.

    ``Pipe`` moves the layer to the device and removes the wrapper, so that names are those of the layer alone. Without
    a pipe the wrapper runs the layer as it is.

    Args:
        module: The layer.
        device: The device that it runs on. Consecutive layers on the same accelerator form one partition; each layer
            that is wrapped with ``"cpu"`` begins a new partition, since several CPU workers can run at the same time.

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 4), WithDevice(nn.Linear(4, 2), "cpu"))
        >>> from pipework import Pipe
        >>> Pipe(model, chunks=4).balance
        [1, 1]
    """

    def __init__(self, module: nn.Module, device: Device) -> None:
        super().__init__()
        self.module = module
        self._device = device

    @property
    def device(self) -> Device:
        """The device that was given."""
        return self._device

    def forward(self, *args: object, **kwargs: object) -> object:
        """Runs the layer."""
        return self.module(*args, **kwargs)
