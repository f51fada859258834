"""Gives the tensors of a module other contents: they stay the same objects, which optimizers and tied layers refer to.

`move_module` moves them to a device, `MetaMemory` gives those of the meta device memory and takes it back, and
`whole_parameters` puts whole parameters in the place of DTensors while a layer is initialised.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils import swap_tensors

from pipework import torch_private
from pipework.values.dtensor import is_dtensor, local_part, local_region, with_local_part

if TYPE_CHECKING:
    from collections.abc import Iterator


def moved(tensor: Tensor, device: torch.device) -> Tensor:
    """The tensor on a device, for the worker there.

    The host waits only for what goes to the CPU: an accelerator's worker waits for the caller's stream, whereas a CPU
    worker reads at once.

    Example:
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


class MetaMemory:
    """Gives a module's parameters and buffers on the meta device memory.

    The tensors stay the same objects, so an optimizer that has them keeps working, and tied tensors stay tied. The
    memory is filled with marks, which show later whether a tensor has been filled.

    Raises:
        RuntimeError: another object refers to a tensor in a way that an exchange would break. Nothing has changed then.

    Example:
        >>> layer = nn.Linear(2, 2, bias=False, device="meta")
        >>> weight = layer.weight
        >>> meta_memory = MetaMemory(layer, torch.device("cpu"))
        >>> layer.weight is weight, weight.device, meta_memory.is_filled(weight)
        (True, device(type='cpu'), False)
        >>> meta_memory.take_back(weight)
        >>> weight.device
        device(type='meta')
    """

    def __init__(self, module: nn.Module, device: torch.device) -> None:
        self._module = module
        self._meta: dict[int, tuple[Tensor, Tensor, int]] = {}  # the tensor, its replacement, its version when marked
        with torch.inference_mode(False), torch_private.without_flat_weights(module):
            try:
                for name, tensor in (*module.named_parameters(), *module.named_buffers()):
                    if tensor.is_meta:
                        self._give(name, tensor, device)
            except BaseException:
                self.take_back()
                raise

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors that have got memory and still have it."""
        return [tensor for tensor, _, _ in self._meta.values()]

    def is_written(self, tensor: Tensor) -> bool:
        """Whether the tensor has been written to, other than through `.data`."""
        part = local_part(tensor)
        return torch_private.version(part) != self._meta[id(tensor)][2] or not part.numel()

    def is_filled(self, tensor: Tensor) -> bool:
        """Whether the whole tensor has been filled: no floating-point number is NaN.

        For integers the check finds only whether anything was written.
        """
        if tensor.is_floating_point() or tensor.is_complex():
            with contextlib.suppress(NotImplementedError, RuntimeError):  # some narrow types have no isnan
                return not bool(torch.isnan(local_part(tensor.detach())).any())
            return self.is_written(tensor)
        return self.is_written(tensor) or not bool(torch.all(local_part(tensor) == _mark(tensor.dtype)))

    def take_back(self, *tensors: Tensor) -> None:
        """Moves tensors back to the meta device; without arguments, all tensors that have got memory."""
        with torch_private.without_flat_weights(self._module):
            for tensor in tensors or self.tensors:
                _exchange(tensor, self._meta.pop(id(tensor))[1])

    def _give(self, name: str, tensor: Tensor, device: torch.device) -> None:
        if torch_private.has_tensor_hooks(tensor):
            raise RuntimeError(
                f"{name!r} lies on the meta device and cannot be given memory without losing its hooks: register them "
                "after the pipe is made"
            )
        part = torch.empty_like(local_part(tensor), device=device, requires_grad=False)
        with contextlib.suppress(NotImplementedError, RuntimeError):  # some narrow types cannot even be filled
            part.fill_(_mark(tensor.dtype))
        other = with_local_part(part, tensor)
        if isinstance(tensor, nn.Parameter):
            other = nn.Parameter(other, tensor.requires_grad)
        other.__class__ = type(tensor)
        other.__dict__.update(tensor.__dict__)  # attributes that users have set on a parameter
        try:
            _exchange(tensor, other)
        except RuntimeError as error:
            raise RuntimeError(
                f"{name!r} lies on the meta device and cannot be given memory, because another object holds on to it "
                f"({error}): make that object, such as a graph, a compiled module or a wrapper, after the pipe"
            ) from error
        self._meta[id(tensor)] = (tensor, other, torch_private.version(local_part(tensor)))


def _exchange(tensor: Tensor, other: Tensor) -> None:
    swap_tensors(tensor, other)  # type: ignore[no-untyped-call]


def _mark(dtype: torch.dtype) -> Any:
    if dtype.is_floating_point or dtype.is_complex:
        return float("nan")
    return True if dtype is torch.bool else torch.iinfo(dtype).min


@contextlib.contextmanager
def whole_parameters(layer: nn.Module, device: torch.device) -> Iterator[None]:
    """Inside, plain parameters on the meta device are in the place of DTensors there.

    Afterwards the DTensors are in their places again, the same objects. Those whose whole parameter has got memory have
    their part of it, on a device.

    Args:
        layer: whose.
        device: of the process.
    """
    wholes: dict[int, tuple[Tensor, nn.Parameter]] = {}
    places: list[tuple[dict[str, Any], str, Tensor]] = []
    for module in layer.modules():
        for name, tensor in module._parameters.items():
            if tensor is not None and tensor.is_meta and is_dtensor(tensor):
                empty = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
                wholes.setdefault(id(tensor), (tensor, nn.Parameter(empty, tensor.requires_grad)))
                places.append((module._parameters, name, tensor))
    for registry, name, sharded in places:
        registry[name] = wholes[id(sharded)][1]
    try:
        yield
    finally:
        for registry, name, sharded in places:
            registry[name] = sharded
    for sharded, whole in wholes.values():
        if not whole.is_meta and is_dtensor(sharded):
            offsets, sizes = local_region("it", sharded)
            part = whole.detach()[tuple(slice(start, start + size) for start, size in zip(offsets, sizes, strict=True))]
            filled = with_local_part(part.to(device, copy=True, memory_format=torch.contiguous_format), sharded)
            swap_tensors(sharded, nn.Parameter(filled, sharded.requires_grad))  # type: ignore[no-untyped-call]
