"""Compares the parts of a model with the model itself on the sample, so that no difference stays unnoticed."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from pipework.model.parts.execution.leaves import flatten, mapped, tensors_in
from pipework.torch_private import pytree
from pipework.values import nested

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pipework.model.parts.cut import Cuttable


def check_parts(cuttable: Cuttable, layers: nn.Sequential) -> None:
    """Raises a ValueError if the parts give another result for the rows of the dry run than the model itself.

    Both run in evaluation mode and without gradients. Flags, buffers and random states stay as they are.

    Args:
        cuttable: of the model; nothing is compared if a part of it is on the meta device.
        layers: the parts.
    """
    if not runs_here(cuttable):
        return
    model = cuttable.model
    arguments, keywords = cuttable.adapter.inputs(*cuttable.sample)
    with evaluating(model, layers):
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


def runs_here(cuttable: Cuttable) -> bool:
    """Whether the model itself can run as it is: it has values, and all of it is on the device of the sample."""
    model = cuttable.model
    devices = {tensor.device for tensor in (*model.parameters(), *tensors_in(cuttable.sample))}
    return len(devices) <= 1 and not any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))


def _through(layers: nn.Sequential, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
    first, *others = layers
    value = first(*arguments, **keywords)
    for layer in others:
        value = layer(value)
    return value


@contextlib.contextmanager
def evaluating(*modules: nn.Module) -> Iterator[None]:
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
    if len(wanted) != len(got) or not nested.same(form, other):
        return f"wanted {form}, got {other}"
    paths = [pytree.keystr(path) for path, _ in pytree.tree_flatten_with_path(expected)[0]]
    for number, (left, right) in enumerate(zip(wanted, got, strict=True)):
        place = paths[number] if len(paths) == len(wanted) else f"output {number}"
        if isinstance(left, Tensor) and isinstance(right, Tensor):
            if left.shape != right.shape or left.dtype != right.dtype:
                return f"{place} is {_form(left)} and became {_form(right)}"
            if not torch.equal(left, right) and not _equal_but_nan(left, right):  # usually nothing is copied
                return f"{place} differs by up to {(left - right).abs().max():.3g}"
        elif isinstance(left, Tensor) != isinstance(right, Tensor):
            return f"{place} is a {type(left).__name__} and became a {type(right).__name__}"
    return None


def _equal_but_nan(left: Tensor, right: Tensor) -> bool:
    return torch.equal(left.nan_to_num(), right.nan_to_num()) and torch.equal(left.isnan(), right.isnan())


def _form(tensor: Tensor) -> str:
    return f"{tensor.dtype} of shape {tuple(tensor.shape)}"
