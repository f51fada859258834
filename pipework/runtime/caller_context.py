"""The thread-local settings of PyTorch: captured on the caller's thread and entered on workers.

A new thread inherits neither grad mode, inference mode, autocast, saved-tensor hooks nor the default device. Without
them a layer would compute something else on a worker than on the caller's thread.
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


class Autocast(NamedTuple):
    """One device type's autocast state."""

    device_type: str
    dtype: torch.dtype
    cache_enabled: bool


class CallerContext(NamedTuple):
    """The thread-local settings of the thread that called the pipe, taken by `capture`."""

    grad: bool
    inference: bool
    autocasts: tuple[Autocast, ...]
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
                    Autocast(device_type, torch.get_autocast_dtype(device_type), torch.is_autocast_cache_enabled())
                    for device_type in device_types
                    if device_type != "meta" and torch.is_autocast_enabled(device_type)  # which refuses "meta"
                ]
            ),
            saved_tensor_hooks=torch_private.saved_tensor_hooks(),
            # The CPU is the default of a new thread; entering it costs every operator a microsecond.
            default_device=None if default_device is None or default_device.type == "cpu" else default_device,
        )

    @property
    def is_usual(self) -> bool:
        """Whether a new thread has these settings by default, so that nothing need be entered."""
        return self.grad and not (self.inference or self.autocasts or self.saved_tensor_hooks or self.default_device)

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
            for autocast in self.autocasts:
                kind, dtype, cached = autocast.device_type, autocast.dtype, autocast.cache_enabled
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
            for autocast in self.autocasts:
                stack.enter_context(torch.autocast(autocast.device_type, enabled=False))
            yield


def allows_worker(*, in_backward: bool) -> bool:
    """Whether a worker computes on the current thread what it would compute on a thread of its own.

    What is in force here would be in force for the worker's backwards, too, and in the whole step: autocast, also of
    other devices, would keep casts from step to step; hooks for saved tensors, and modes, would act twice;
    `torch.compile` would compile the worker.

    Args:
        in_backward: whether autograd calls: then inference mode would be in force in recomputations, anomaly mode would
            tie their graphs to the present node in a circle, and a backward for some inputs only would forbid
            reentrant checkpoints in layers.
    """
    if torch_private.any_autocast() or torch_private.any_modes() or torch_private.is_compiled_here():
        return False
    if torch_private.saved_tensor_hooks() is not None:
        return False
    if not in_backward:
        return True
    for_all = torch_private.accumulates_all()
    return for_all and not torch.is_inference_mode_enabled() and not torch.is_anomaly_enabled()
