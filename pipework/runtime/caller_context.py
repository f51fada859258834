"""The thread-local settings of PyTorch: captured on the caller's thread and entered on workers.

A new thread inherits neither grad mode, inference mode, autocast, saved-tensor hooks nor the default device. Without
them a layer would compute something else on a worker than on the caller's thread.
The settings are always those around the forward.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.utils.checkpoint

from pipework import torch_private

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from torch import Tensor


class CallerContext(NamedTuple):
    """The thread-local settings of the thread that called the pipe, taken by `capture`.

    Attributes:
        grad: whether gradients are recorded.
        inference: whether inference mode is on.
        autocasts: of each type of device where autocast is on: the type, the dtype, and whether casts are cached.
        saved_tensor_hooks: the innermost ones.
        default_device: None: the CPU.
    """

    grad: bool
    inference: bool
    autocasts: tuple[tuple[str, torch.dtype, bool], ...]
    saved_tensor_hooks: tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]] | None
    default_device: torch.device | None

    @classmethod
    def capture(cls, device_types: Iterable[str]) -> CallerContext:
        """Reads the current thread's settings; autocast for the given device types, each given once."""
        # A default device other than the CPU is a mode. PyTorch makes a tensor to find it.
        default_device = torch.get_default_device() if torch_private.any_modes() else None
        return cls(
            grad=torch.is_grad_enabled(),
            inference=torch.is_inference_mode_enabled(),
            autocasts=tuple(
                [
                    (device_type, torch.get_autocast_dtype(device_type), torch.is_autocast_cache_enabled())
                    for device_type in device_types
                    if device_type != "meta" and torch.is_autocast_enabled(device_type)  # which refuses "meta"
                ]
            ),
            saved_tensor_hooks=torch_private.saved_tensor_hooks(),
            # The CPU is the default of a new thread; entering it costs every operator a microsecond.
            default_device=None if default_device is None or default_device.type == "cpu" else default_device,
        )

    @property
    def is_checkpointing(self) -> bool:
        """Whether `torch.utils.checkpoint` is around the caller, in its mode with hooks (`use_reentrant=False`).

        Such a hook runs the checkpointed function again on the thread that needs a saved tensor: on a worker.
        """
        hooks = self.saved_tensor_hooks
        return self.grad and hooks is not None and hooks[0].__module__ == torch.utils.checkpoint.__name__

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """Sets everything for a forward computation on the current thread."""
        with contextlib.ExitStack() as stack:
            if self.inference:
                stack.enter_context(torch.inference_mode())
            stack.enter_context(torch.set_grad_enabled(self.grad))
            for kind, dtype, cached in self.autocasts:
                stack.enter_context(torch.autocast(kind, dtype=dtype, cache_enabled=cached))
            if self.saved_tensor_hooks is not None:
                stack.enter_context(torch.autograd.graph.saved_tensors_hooks(*self.saved_tensor_hooks))
            if self.default_device is not None:
                stack.enter_context(self.default_device)
            yield

    @contextlib.contextmanager
    def without_autocast(self) -> Iterator[None]:
        """Inside of `entered`: switches autocast off for a backward, and keeps its cache of casts."""
        with contextlib.ExitStack() as stack:
            for kind, _, _ in self.autocasts:
                stack.enter_context(torch.autocast(kind, enabled=False))
            yield
