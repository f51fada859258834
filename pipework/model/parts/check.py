"""Compares the parts of a model with the model itself on the sample, so that no difference stays unnoticed."""

from __future__ import annotations

import contextlib
import functools
import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from pipework import torch_private
from pipework.model.parts.cut import arguments_of
from pipework.model.parts.execution.leaves import flatten, mapped, tensors_in
from pipework.values import equality

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from pipework.model.parts.cut import Cuttable


def check_parts(cuttable: Cuttable, layers: nn.Sequential, sample: Any) -> None:
    """Raises a ValueError if the parts give another result for the sample than the model itself.

    Both run in evaluation mode and without gradients. Flags, buffers and random states stay as they are.

    Args:
        cuttable: of the model; nothing is compared if a part of it is on the meta device.
        layers: the parts.
        sample: as for the model.
    """
    model = cuttable.model
    if any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers())):
        return
    arguments, keywords = cuttable.adapter.inputs(*arguments_of(sample))
    if len({tensor.device for tensor in (*model.parameters(), *tensors_in((arguments, keywords)))}) > 1:
        return  # the model itself does not run as it is
    with _evaluating(model, layers):
        own, named = mapped(Tensor, torch.clone, (arguments, keywords))
        expected = cuttable.adapter.result(type(model).forward(model, *own, **named))
        own, named = mapped(Tensor, torch.clone, (arguments, keywords))
        where = _difference(expected, _through(layers, own, named))
    if where is not None:
        raise ValueError(
            f"the parts of {type(model).__name__} give another result than the model itself for the sample: {where}. "
            "Something of its forward cannot be followed; put it into a unit (a module that the forward calls), or "
            "name larger units with blocks=. check=False leaves the comparison out"
        )


def adds_up(cuttable: Cuttable, sample: Any, loss_of: Callable[[Any], Tensor]) -> bool:
    """Whether the model's loss of the sample is the sum of its losses of two halves of it, and not their mean.

    Args:
        cuttable: of the model.
        sample: as for the model. One that cannot be halved tells nothing.
        loss_of: reads the loss from what the model returns.
    """
    model = cuttable.model
    arguments = cuttable.adapter.inputs(*arguments_of(sample))
    tensors = (*tensors_in(arguments), *model.parameters(), *model.buffers())
    rows = {len(tensor) for tensor in tensors_in(arguments) if tensor.dim()}
    if len(rows) != 1 or (half := max(rows) // 2) < 1 or len({tensor.device for tensor in tensors}) > 1:
        return False
    losses = []
    with _evaluating(model):
        for piece in (slice(None), slice(None, half), slice(half, None)):
            own, named = mapped(Tensor, functools.partial(_rows, piece=piece), arguments)
            try:
                losses.append(float(loss_of(cuttable.adapter.result(type(model).forward(model, *own, **named)))))
            except Exception:  # so small a batch may be none that it takes
                return False
    whole, total = losses[0], sum(losses[1:])
    return math.isclose(whole, total, rel_tol=1e-3) and not math.isclose(whole, total / 2, rel_tol=0.1)


def _rows(tensor: Tensor, piece: slice) -> Tensor:
    return tensor[piece] if tensor.dim() else tensor


def _through(layers: nn.Sequential, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
    first, *others = layers
    value = first(*arguments, **keywords)
    for layer in others:
        value = layer(value)
    return value


@contextlib.contextmanager
def _evaluating(*modules: nn.Module) -> Iterator[None]:
    """Evaluation mode without gradients; afterwards flags, buffers and the random state are as before."""
    every = [each for module in modules for each in module.modules()]
    flags = [(vars(each), each.training) for each in every if "training" in vars(each)]
    buffers = [(buffer, buffer.clone()) for each in every for buffer in each._buffers.values() if buffer is not None]
    for attributes, _ in flags:
        attributes["training"] = False  # eval() may do more, such as merge adapters
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            yield
    finally:
        for attributes, flag in flags:
            attributes["training"] = flag
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)


def _difference(expected: Any, actual: Any) -> str | None:
    """Where two results differ, and how; None: they are the same."""
    wanted, form = flatten(expected)
    got, other = flatten(actual)
    if len(wanted) != len(got) or not equality.same(form, other):
        return f"wanted {form}, got {other}"
    paths = torch_private.paths_of(expected)
    for number, (left, right) in enumerate(zip(wanted, got, strict=True)):
        place = paths[number] if len(paths) == len(wanted) else f"output {number}"
        if isinstance(left, Tensor) and isinstance(right, Tensor):
            if left.shape != right.shape or left.dtype != right.dtype:
                return f"{place} is {_form(left)} and became {_form(right)}"
            if not torch.equal(left.nan_to_num(), right.nan_to_num()) or not torch.equal(left.isnan(), right.isnan()):
                return f"{place} differs by up to {(left - right).abs().max():.3g}"
        elif isinstance(left, Tensor) != isinstance(right, Tensor):
            return f"{place} is a {type(left).__name__} and became a {type(right).__name__}"
    return None


def _form(tensor: Tensor) -> str:
    return f"{tensor.dtype} of shape {tuple(tensor.shape)}"
