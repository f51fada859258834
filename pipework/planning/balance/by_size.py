"""Balance by memory: parameters, and the activations that are kept for the backward."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from pipework.assignment.balance import check_partitions
from pipework.assignment.minimax import minimax_partition
from pipework.model.sequential import TupleRule, tuple_rule
from pipework.planning.balance.sandbox import copies, cut, entered, measuring_device, tensors_of, traceless
from pipework.torch_private import pytree, storage_key


def balance_by_size(
    partitions: int,
    module: nn.Sequential,
    input: Tensor | tuple[Any, ...],
    *,
    chunks: int = 1,
    param_scale: float = 2.0,
    device: torch.device | str | int | None = None,
) -> list[int]:
    """Balances the memory of the partitions.

    A layer's size is ``bytes of its parameters * param_scale + bytes of its activations for one micro-batch``.
    Activations are the tensors that autograd saves for the backward, and the layer's output. Each piece of memory
    counts once, for the layer that makes it. Copies of the layers run forward once: parameters, buffers, gradients,
    training flags, devices and random states stay as they are.

    Args:
        partitions: The number of partitions, from 1 to the number of layers.
        module: The layers.
        input: One mini-batch. A tuple is spread into the first layer's positional arguments, unless its ``forward``
            takes only one.
        chunks: The number of micro-batches of the mini-batch; the first one, which is the largest, is measured.
        param_scale: The number of copies of each parameter: 2 for the parameter and its gradient, 3 with a momentum, 4
            with the two moments of Adam; add 1 for the gradient buffer of a training step.
        device: The device to run on; by default the current accelerator, else the CPU. On ``"meta"`` nothing is
            computed.

    Returns:
        The number of layers of each partition; the largest size is as small as possible.

    Raises:
        ValueError: The number of partitions or of chunks, or the scale, is out of range.

    Example:
        >>> module = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(3)), torch.nn.Linear(8, 32))
        >>> balance_by_size(2, module, torch.zeros(4, 8), device="meta")
        [3, 1]
    """
    check_partitions(partitions, len(module))
    if chunks < 1:
        raise ValueError(f"chunks must be at least 1, got {chunks}")
    if param_scale < 0:
        raise ValueError(f"param_scale must not be negative, got {param_scale}")
    where = measuring_device(device)
    sizes = []
    with traceless(where):
        value = cut(_first_micro_batch(input, chunks), where)
        before: list[Tensor] = []  # the input of the first layer belongs to it, later ones to the layer before
        for layer in copies(module, where):
            output, activations = _run(layer, value, before, tuple_rule(module))
            parameters = sum(parameter.nbytes for parameter in layer.parameters())
            sizes.append(parameters * param_scale + activations)
            value = cut(output, where)
            before = tensors_of(value)
    return minimax_partition(sizes, partitions)


def _first_micro_batch(input: Any, chunks: int) -> Any:
    def first(item: Any) -> Any:
        if not isinstance(item, Tensor) or item.dim() == 0 or len(item) == 0:
            return item
        return item.tensor_split(min(chunks, len(item)))[0]

    return pytree.tree_map(first, input)


def _run(layer: nn.Module, value: Any, before: list[Tensor], tuples: TupleRule) -> tuple[Any, int]:
    """Runs a layer forward. Returns its output and the bytes that it adds to the memory kept for the backward."""
    saved: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        saved.append(tensor.detach())  # keeps the memory alive, so that no other tensor can get the same memory
        return saved[-1]  # not the tensor itself: an output that its own node saves would never be freed

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = layer(*tuples.arguments(entered(value), layer))
    ours = _memory([*saved, *tensors_of(output)])
    others = _memory([*before, *layer.parameters(), *layer.buffers()])
    return output, sum(size for place, size in ours.items() if place not in others)


def _memory(tensors: Iterable[Tensor]) -> dict[int, int]:
    """The distinct pieces of memory behind some tensors, with their bytes; views share one."""
    memory = {}
    for tensor in tensors:
        if tensor.layout is torch.strided:
            storage = tensor.untyped_storage()
            memory[storage_key(storage)] = storage.nbytes()
        else:
            memory[id(tensor)] = tensor.nbytes
    return memory
