"""A layer that says on which device it is to run."""

import torch
from torch import nn

Device = torch.device | str | int


class WithDevice(nn.Module):
    """Says on which device a layer runs, above all a layer without parameters, whose device nothing else tells.

    ``Pipe`` moves the layer there and takes the wrapper off, so that names are those of the layer alone. By itself the
    wrapper runs the layer as it is.

    Args:
        module: The layer.
        device: Where it runs. Consecutive layers on the same accelerator form one partition; each layer that is wrapped
            with ``"cpu"`` begins a partition of its own, since several CPU workers can run at the same time.

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 4), WithDevice(nn.Linear(4, 2), "cpu"))
        >>> from pipework import Pipe
        >>> Pipe(model).balance
        [1, 1]
    """

    def __init__(self, module: nn.Module, device: Device) -> None:
        super().__init__()
        self.module = module
        self._device = device

    @property
    def device(self) -> Device:
        """The device as it was given."""
        return self._device

    def forward(self, *args: object, **kwargs: object) -> object:
        """Runs the layer."""
        return self.module(*args, **kwargs)
