"""Gives tensors on the meta device memory and takes it back; they stay the same objects."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import swap_tensors

from pipework import torch_private
from pipework.values.dtensor import local_part, with_local_part


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
