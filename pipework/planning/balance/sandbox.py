"""Runs copies of layers one by one, so that a measurement changes nothing in the user's module."""

import copy
import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from pipework.autograd import boundary
from pipework.values import nested


def measuring_device(device: torch.device | str | int | None) -> torch.device:
    """The given device, else the current accelerator, else the CPU."""
    if device is not None:
        return torch.device(device)
    return torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")


def copies(module: nn.Sequential, device: torch.device) -> Iterator[nn.Module]:
    """Copies of the layers on ``device``, made one at a time, without gradients and in training mode.

    A layer in evaluation mode within a module in training mode stays in evaluation mode.
    """
    for layer in module:
        clone = copy.deepcopy(layer)
        clone.zero_grad(set_to_none=True)
        yield (clone if module.training else clone.train()).to(device)


def cut(value: Any, device: torch.device) -> Any:
    """The same value with copies of its tensors as leaves: detached from their graph, with memory of their own."""
    tensors, structure = nested.flatten(value)
    leaves = tuple([tensor.detach().to(device, copy=True).requires_grad_(tensor.requires_grad) for tensor in tensors])
    return nested.unflatten(leaves, structure)


def entered(value: Any) -> Any:
    """The value as input of a layer: not leaves, since the layer may begin with an in-place operation."""
    tensors, structure = nested.flatten(value)
    return nested.unflatten(tuple(map(boundary.enter, tensors)), structure)


def tensors_of(value: Any) -> list[Tensor]:
    """All tensors in a nested value, each once."""
    return list(nested.flatten(value)[0])


def now(device: torch.device) -> float:
    """The time in seconds, after the device has finished all queued work."""
    if device.type not in ("cpu", "meta"):
        torch.accelerator.synchronize(device)
    return time.perf_counter()


@contextmanager
def traceless(device: torch.device) -> Iterator[None]:
    """Enables gradients, and restores Python's random state and those of the CPU and of ``device`` afterwards."""
    with torch.inference_mode(False), torch.enable_grad(), torch.random.fork_rng(devices=[]), _own_random():
        if device.type in ("cpu", "meta"):
            yield
            return
        generators = torch.get_device_module(device)
        which = () if device.type == "mps" else (device,)  # there is one MPS device, and it takes no argument
        state = generators.get_rng_state(*which)
        try:
            yield
        finally:
            generators.set_rng_state(state, *which)


@contextmanager
def _own_random() -> Iterator[None]:
    state = random.getstate()
    try:
        yield
    finally:
        random.setstate(state)


@contextmanager
def threads_of_a_worker(workers: int) -> Iterator[None]:
    """Uses the number of intra-op threads that each of so many CPU workers has."""
    threads = torch.get_num_threads()
    if workers <= 1:
        yield
        return
    torch.set_num_threads(max(1, threads // workers))
    try:
        yield
    finally:
        torch.set_num_threads(threads)
