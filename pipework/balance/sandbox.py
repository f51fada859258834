"""Layers run one by one on copies, so that measuring leaves no trace in the user's module."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from pipework.runtime.stage import takes_tuple_whole


def measuring_device(device: torch.device | str | int | None) -> torch.device:
    """The device asked for, else the current accelerator, else the CPU."""
    if device is not None:
        return torch.device(device)
    return torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")


def copies(module: nn.Sequential, device: torch.device) -> Iterator[nn.Module]:
    """Copies of the layers on ``device``, made one at a time, without gradients and in training mode.

    A layer that is frozen in evaluation mode within a training module stays so.
    """
    for layer in module:
        clone = copy.deepcopy(layer)
        clone.zero_grad(set_to_none=True)
        yield (clone if module.training else clone.train()).to(device)


def call(layer: nn.Module, value: Any) -> Any:
    """Calls a layer with the previous layer's result, as a stage does."""
    return layer(*value) if type(value) is tuple and not takes_tuple_whole(layer) else layer(value)


def cut(value: Any, device: torch.device) -> Any:
    """The same value with leaves in place of its tensors: no graph leads out of them."""

    def leaf(item: Any) -> Any:
        if not isinstance(item, Tensor):
            return item
        return item.detach().to(device).requires_grad_(item.requires_grad)

    return pytree.tree_map(leaf, value)


def tensors_of(value: Any) -> list[Tensor]:
    """All tensors in a nested value."""
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]


@contextmanager
def traceless(device: torch.device) -> Iterator[None]:
    """Gradients on, and the random states of the CPU and of ``device`` as before afterwards."""
    with torch.enable_grad(), torch.random.fork_rng(devices=[]):
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
def threads_of_a_worker(workers: int) -> Iterator[None]:
    """As many intra-op threads as one of so many CPU workers has."""
    threads = torch.get_num_threads()
    if workers <= 1:
        yield
        return
    torch.set_num_threads(max(1, threads // workers))
    try:
        yield
    finally:
        torch.set_num_threads(threads)
