"""Any module as what is measured: the layers at which it is cut, its arguments, and the loss that it computes."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torch import nn

from pipework.assignment.partition import check_sequential
from pipework.integrations import adapter_for
from pipework.model.parts.cut import Cuttable
from pipework.model.parts.sample import ForwardArguments, LossPlace, as_given
from pipework.signatures import signature_of

if TYPE_CHECKING:
    from collections.abc import Mapping


def as_layers(
    model: Any, sample: Any, keywords: Mapping[str, Any] | None, target: Any, loss_fn: Any
) -> tuple[nn.Sequential, dict[str, Any]]:
    """The layers, and the arguments of a measurement, by their names in `profile`.

    Args:
        model: layers, which stay as they are, or any module that `pipework.attach` takes.
        sample: of layers, the inputs; of another module, what `attach` takes.
        keywords: of layers, keyword arguments of the first one.
        target: of the loss; for a module that computes its loss itself, the name of the argument that it needs.
        loss_fn: the loss; None: the model's own, or none.

    Raises:
        TypeError: it is no module.
        ValueError: it cannot be cut; the message says why.

    Example:
        >>> import torch
        >>> class Net(nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        ...
        ...     def forward(self, x, labels):
        ...         for block in self.blocks:
        ...             x = block(x)
        ...         return (x - labels).square().mean()
        >>> layers, given = as_layers(Net(), {"x": torch.zeros(8, 4), "labels": torch.zeros(8, 4)}, None, None, None)
        >>> len(layers), given["target"].shape, given["loss_fn"]
        (3, torch.Size([8, 4]), LossPlace(key=None))
    """
    given = {"sample": sample, "keywords": keywords, "target": target, "loss_fn": loss_fn}
    if isinstance(model, nn.Sequential):
        return model, given
    if not isinstance(model, nn.Module) or hasattr(model, "partitions"):
        check_sequential(model)
    adapter = adapter_for(model)
    inputs, named = as_given(sample)
    name = target if isinstance(target, str) else "labels" if loss_fn is None else "target"
    split = adapter.split(named, name)
    cuttable = Cuttable(model, sample, blocks=None, adapter=adapter, has_rows=split is None)
    forward = ForwardArguments(signature_of(type(model).forward.__get__(model)), name)
    values = forward.by_name(inputs, named)
    if loss_fn is None and (place := LossPlace.in_result(cuttable.result)) is not None:
        if name not in values:
            raise ValueError(
                f"the sample has no {name!r} (it has {', '.join(map(repr, values))}): name the argument that the "
                "model's loss needs with target="
            )
        loss_fn, target = place, values[name]
    given = {"sample": inputs, "keywords": adapter.mini_batch(named), "target": target, "loss_fn": loss_fn}
    if split is not None:
        forward = forward if name in values else replace(forward, target=None)
        given["split"] = functools.partial(forward.split, split)
    return cuttable.sequential(), given
