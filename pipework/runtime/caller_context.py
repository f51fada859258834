"""The thread-local settings and modes of PyTorch: captured on the caller's thread and entered on workers.

A new thread inherits neither grad mode, inference mode, autocast, saved-tensor hooks nor the default device. Without
them a layer would compute something else on a worker than on the caller's thread.

A mode sees every operator of its thread: `torch.utils.flop_counter.FlopCounterMode` counts them, debugging modes print
them, others replace them. Each thread has a stack of modes, so a mode of the caller would see nothing on a worker. A
mode is the user's object, written for one thread: while there is one, one thread executes the actions of all workers.
The settings are always those around the forward. The modes in a backward are those around `loss.backward()`.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.utils.checkpoint

from pipework import torch_private

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from contextlib import AbstractContextManager

    from torch import Tensor
    from torch.overrides import TorchFunctionMode

    from pipework.torch_private import TorchDispatchMode


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


class Modes(NamedTuple):
    """The modes of the thread that called `capture`, outermost first.

    Attributes:
        function: `TorchFunctionMode`s, which see calls of PyTorch's functions.
        dispatch: `TorchDispatchMode`s, which see the operators that those functions are made of.
    """

    function: tuple[TorchFunctionMode, ...]
    dispatch: tuple[TorchDispatchMode, ...]

    @classmethod
    def capture(cls) -> Modes:
        """Reads the current thread's modes. A default device, which is a mode too, belongs to `CallerContext`."""
        if not torch_private.any_modes():  # the usual case
            return cls((), ())
        return cls(tuple(torch_private.function_modes()), tuple(torch_private.dispatch_modes()))

    def __bool__(self) -> bool:
        """Whether there are any."""
        return bool(self.function or self.dispatch)

    def entered(self) -> AbstractContextManager[None]:
        """Puts the modes on the current thread's stacks."""
        return torch_private.modes_pushed(self.function, self.dispatch)
