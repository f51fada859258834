"""Moves modules to the device of their stage, and the caller's tensors to the device of the stage that reads them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch.utils import swap_tensors

from pipework import torch_private

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn


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


def move_module(module: nn.Module, device: torch.device) -> None:
    """Moves a module to a device; its parameters stay the same objects.

    PyTorch moves the contents of a parameter between most devices. Between others, such as the CPU and a device type
    that was added to PyTorch, `Module.to` makes new parameters: an optimizer that was made before would go on with the
    old ones, and a parameter of two modules would become two. So the new contents are put into the old objects.

    Raises:
        RuntimeError: PyTorch made new parameters, and a graph or a weak reference holds on to an old one.

    Example:
        >>> import torch
        >>> layer = torch.nn.Linear(2, 2)
        >>> weight = layer.weight
        >>> move_module(layer, torch.device("cpu"))
        >>> layer.weight is weight
        True
    """
    before = [(owner, dict(owner._parameters)) for owner in module.modules()]
    module.to(device)
    made = [
        (owner, name, parameter, owner._parameters[name])
        for owner, parameters in before
        for name, parameter in parameters.items()
        if parameter is not None and owner._parameters[name] is not parameter
    ]
    if not made:
        return
    exchanged = set()
    with torch_private.without_flat_weights(module):
        for owner, name, parameter, new in made:
            if id(parameter) not in exchanged:  # one that two modules share was moved twice
                swap_tensors(parameter, new)  # type: ignore[no-untyped-call]
                exchanged.add(id(parameter))
            owner._parameters[name] = parameter
