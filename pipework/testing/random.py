"""Random numbers for the un-pipelined model: the same ones that its layers draw in a pipe."""

from __future__ import annotations

import contextlib
import itertools
from typing import TYPE_CHECKING, Any

from pipework.runtime.device import is_accelerator
from pipework.runtime.random.shards import install_for_dtensors
from pipework.runtime.random.unseen_draws import generators_left_alone

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    import torch
    from torch import nn


@contextlib.contextmanager
def micro_batch_random(model: nn.Sequential, key: int, micro_batch: int) -> Iterator[None]:
    """A context for one run of the model on one micro-batch, in which its layers draw the same numbers as in a pipe.

    Numbers that are drawn behind the last layer, such as by a loss function, come from the stream of one more layer.

    Args:
        model: the un-pipelined model, on any devices.
        key: drawn by the pipe at its call; `draw_key()` draws the same one from the same state of the generator.
        micro_batch: the number of the micro-batch.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from pipework import Pipe
        >>> from pipework.testing import draw_key
        >>> model, x = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)), torch.ones(2, 4)
        >>> _ = torch.manual_seed(1)
        >>> output = Pipe(model, chunks=2, balance=[1, 1], devices=["cpu", "cpu"])(x)
        >>> _ = torch.manual_seed(1)
        >>> key = draw_key()
        >>> with micro_batch_random(model, key, 1):
        ...     torch.equal(model(x[1:]), output[1:])
        True
    """
    behind = itertools.count(1)
    running: list[nn.Module] = []

    def enter(module: nn.Module, inputs: Any) -> None:
        running.append(module)

    def leave(module: nn.Module, inputs: Any, output: Any) -> None:
        running.pop()
        if not running:  # a layer may also be part of another layer
            enter_layer(next(behind))

    # A layer at two places has one hook and is called twice: the count tells the places apart.
    handles = []
    for layer in {id(layer): layer for layer in model}.values():
        handles += [layer.register_forward_pre_hook(enter), layer.register_forward_hook(leave, always_call=True)]
    try:
        with drawing({parameter.device for parameter in model.parameters()}, key, micro_batch) as enter_layer:
            enter_layer(0)
            yield
    finally:
        for handle in handles:
            handle.remove()


@contextlib.contextmanager
def drawing(devices: Iterable[torch.device], key: int, micro_batch: int) -> Iterator[Callable[[int], None]]:
    """A context in which this thread draws the random numbers of one micro-batch.

    Args:
        devices: on which numbers are drawn.
        key: see `micro_batch_random`.
        micro_batch: likewise.

    Yields:
        What starts the stream of a layer, by the layer's number.
    """
    install_for_dtensors()
    accelerators = filter(is_accelerator, devices)
    # Not locked: a backward in here may call a pipe, on autograd's thread, whose workers draw meanwhile.
    with generators_left_alone(accelerators, key, locked=False) as stream:
        yield lambda number: stream.enter(number, micro_batch)
