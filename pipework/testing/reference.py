"""The reference for exactness: one mini-batch on the un-pipelined model, micro-batch by micro-batch."""

from __future__ import annotations

import contextlib
import functools
import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from pipework.autograd.aliases import SharedMemory
from pipework.model.marks import MicroBatches
from pipework.model.sequential import tuple_rule
from pipework.runtime.device import is_accelerator
from pipework.runtime.random.shards import install_for_dtensors
from pipework.runtime.random.unseen_draws import generators_left_alone
from pipework.torch_private import pytree

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

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
    calls = itertools.count()
    layers = {id(layer): layer for layer in model}.values()  # a layer at two places has one hook, and is called twice
    with drawing({parameter.device for parameter in model.parameters()}, key, micro_batch) as enter_layer:
        enter_layer(0)
        with streams_entered({str(n): layer for n, layer in enumerate(layers)}, lambda name: next(calls), enter_layer):
            yield


@contextlib.contextmanager
def streams_entered(
    modules: Mapping[str, nn.Module], stream_of: Callable[[str], int | None], enter: Callable[[int], None]
) -> Iterator[None]:
    """A context in which modules draw from streams of their own, and what follows a module from the next stream.

    Args:
        modules: by name. One that runs inside of another one draws from that one's stream.
        stream_of: called with the name of each module that runs; None: it goes on with the present stream.
        enter: starts a stream.
    """
    running: list[int | None] = []

    def before(name: str, module: nn.Module, inputs: Any) -> None:
        running.append(None if running else stream_of(name))
        if running[-1] is not None:
            enter(running[-1])

    def after(module: nn.Module, inputs: Any, output: Any) -> None:
        stream = running.pop()
        if stream is not None:
            enter(stream + 1)

    handles = []
    for name, module in modules.items():
        handles.append(module.register_forward_pre_hook(functools.partial(before, name)))
        handles.append(module.register_forward_hook(after, always_call=True))
    try:
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


@dataclass(frozen=True)
class Reference:
    """What `reference_backward` or `reference_step` computed: the output and the loss of the mini-batch."""

    output: Any
    loss: Tensor


def reference_backward(
    model: nn.Sequential, inputs: Any, loss_fn: Callable[[Any], Tensor], chunks: int, key: int
) -> Reference:
    """Runs forward and backward like a pipe with the loss outside, to the last bit.

    The model runs on each micro-batch; the loss is that of the concatenated outputs; the loss's gradient is cut into
    micro-batches again, and their backwards run in ascending order. Gradients of parameters are summed over the
    whole mini-batch first, and then added to the former `.grad`.

    Args:
        model: the un-pipelined model.
        inputs: the mini-batch, rows along dimension 0, or `MicroBatches`; a tuple of several is given to the model as
            positional arguments. Leaves that require a gradient get one.
        loss_fn: from the output of the mini-batch, as the pipe returns it, to a scalar.
        chunks: of the pipe.
        key: of the random numbers; see `micro_batch_random`.

    Example:
        >>> from torch import nn
        >>> model = nn.Sequential(nn.Linear(4, 4))
        >>> reference_backward(model, torch.randn(3, 4), torch.sum, chunks=2, key=0).output.shape
        torch.Size([3, 4])
    """
    with gradients_added(model) as memory:
        outputs = []
        for micro_batch, rows in enumerate(micro_batches(inputs, chunks)):
            with micro_batch_random(model, key, micro_batch):
                outputs.append(model(*rows))
        whole = joined([output.detach() for output in outputs], inputs)
        leaves = [leaf.requires_grad_() for leaf in (whole if isinstance(whole, MicroBatches) else [whole])]
        made: list[list[Tensor]] = [[] for _ in leaves]
        for leaf, own in zip(leaves, made, strict=True):
            leaf.register_hook(own.append)  # `leaf.grad` may be a copy with other strides
        loss = loss_fn(whole)
        torch.autograd.backward(loss)
        gradients: Sequence[Any] = [own[0] if own else None for own in made]
        if not isinstance(whole, MicroBatches):
            gradients = torch.split(gradients[0], [len(output) for output in outputs])
        for output, gradient in zip(outputs, gradients, strict=True):
            if output.requires_grad:
                output.backward(gradient)
                memory.separate()
    return Reference(joined([output.detach() for output in outputs], inputs), loss.detach())


def joined(outputs: Sequence[Tensor], inputs: Any) -> Any:
    """The outputs of the micro-batches, concatenated or as `MicroBatches`, as the inputs are."""
    if any(isinstance(each, MicroBatches) for each in (inputs if isinstance(inputs, tuple) else (inputs,))):
        return MicroBatches(outputs)
    return torch.cat(list(outputs)) if len(outputs) > 1 else outputs[0]  # as a pipe does, with the output's strides


def micro_batches(inputs: Any, chunks: int) -> list[tuple[Any, ...]]:
    """The positional arguments of each micro-batch; there are no more of them than rows.

    Example:
        >>> [len(rows) for rows, in micro_batches(torch.zeros(9, 2), 4)]
        [3, 2, 2, 2]
    """
    every = inputs if isinstance(inputs, tuple) else (inputs,)
    return _cut(every, max(1, min(chunks, len(every[0]))))


def _cut(value: Any, count: int) -> list[Any]:
    """A nested value for each micro-batch: its tensors are cut along dimension 0, or `MicroBatches` are taken apart."""
    leaves, spec = pytree.tree_flatten(value, is_leaf=lambda leaf: isinstance(leaf, MicroBatches))
    given = next((len(leaf) for leaf in leaves if isinstance(leaf, MicroBatches)), None)

    def pieces(leaf: Any) -> Sequence[Any]:
        if isinstance(leaf, MicroBatches):
            return leaf
        if given is None and isinstance(leaf, Tensor):
            return leaf.tensor_split(count)
        return [leaf] * (count if given is None else given)  # each micro-batch gets it whole

    return [pytree.tree_unflatten(each, spec) for each in zip(*map(pieces, leaves), strict=True)]


@contextlib.contextmanager
def gradients_added(model: nn.Module) -> Iterator[SharedMemory]:
    """A context; at its end the gradients that were computed in it are added to the former ones, in one addition.

    It gives what is to be called after each backward.
    """
    before = [parameter.grad for parameter in model.parameters()]
    for parameter in model.parameters():
        parameter.grad = None
    yield SharedMemory(list(model.parameters()))
    for parameter, earlier in zip(model.parameters(), before, strict=True):
        if earlier is not None:
            parameter.grad = earlier if parameter.grad is None else earlier + parameter.grad


def reference_step(
    model: nn.Sequential,
    inputs: Any,
    target: Any,
    loss_fn: Callable[[Any, Any], Tensor] | None,
    chunks: int,
    key: int,
    *,
    loss_reduction: str = "mean",
    loss_weight: Callable[[Any], Any] | None = None,
    loss_scale: float = 1.0,
) -> Reference:
    """Runs forward and backward like `pipe(*inputs, target=target)` with any schedule, to the last bit.

    For each micro-batch in turn: the model, the loss, `(loss * (rows / all rows)).backward()`. The loss of the
    mini-batch is the sum of these products, in that order. Gradients of parameters are summed over the whole
    mini-batch first, and then added to the former `.grad`.

    Args:
        model: the un-pipelined model.
        inputs: the mini-batch, rows along dimension 0, or `MicroBatches`; a tuple of several is given to the model as
            positional arguments. Leaves that require a gradient get one.
        target: any nested structure, whose tensors are split like the inputs, or `MicroBatches`.
        loss_fn: of the pipe; None: the model's last layer takes the target, too, and returns the loss.
        chunks: of the pipe.
        key: of the random numbers; see `micro_batch_random`.
        loss_reduction: of the pipe.
        loss_weight: of the pipe.
        loss_scale: of the call; it multiplies each micro-batch's factor.

    Returns:
        The loss and the joined outputs; without a `loss_fn` there are no outputs.

    Example:
        >>> from torch import nn
        >>> from pipework import Pipe
        >>> from pipework.testing import draw_key
        >>> model, x, y = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)), torch.randn(5, 4), torch.randn(5, 4)
        >>> mse_loss = nn.functional.mse_loss
        >>> pipe = Pipe(model, 3, balance=[1, 1], devices=["cpu", "cpu"], schedule="1f1b", loss_fn=mse_loss)
        >>> _ = torch.manual_seed(1)
        >>> reference = reference_step(model, x, y, mse_loss, chunks=3, key=draw_key())
        >>> _ = torch.manual_seed(1)
        >>> torch.equal(pipe(x, target=y), reference.loss)
        True
    """
    pieces = micro_batches(inputs, chunks)
    targets = _cut(target, len(pieces))
    if loss_reduction == "sum":
        factors: Sequence[float] = [1.0] * len(pieces)
    else:
        amounts = [len(rows[0]) for rows in pieces] if loss_weight is None else [float(loss_weight(t)) for t in targets]
        factors = [amount / sum(amounts) for amount in amounts]
    factors = [factor * loss_scale for factor in factors]
    parts: list[Tensor] = []
    outputs: list[Any] = []
    with gradients_added(model) as memory:
        for number, (rows, its_target, factor) in enumerate(zip(pieces, targets, factors, strict=True)):
            # A loss function draws from the stream of one more layer.
            with micro_batch_random(model, key, number):
                if loss_fn is None:
                    value: Any = model[:-1](*rows) if len(model) > 1 else rows if len(rows) > 1 else rows[0]
                    loss = model[-1](*tuple_rule(model).arguments(value, model[-1], 1), its_target)
                else:
                    outputs.append(model(*rows))
                    loss = loss_fn(outputs[-1], its_target)
            part = loss * factor
            if factor == 0.0:  # a mean over no element is NaN, and 0 * NaN is NaN, too
                part = loss.new_zeros(())
            if part.requires_grad:
                torch.autograd.backward(part)
                memory.separate()
            parts.append(part.detach())
    output = None if loss_fn is None else joined([output.detach() for output in outputs], inputs)
    return Reference(output, functools.reduce(torch.add, parts))
