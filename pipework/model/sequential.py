"""Sequences of layers: how a tuple reaches a layer, `PipeSequential`, and `WithDevice`, which sets a layer's device."""

from __future__ import annotations

from enum import Enum
from typing import Any, ClassVar

import torch
from torch import nn

from pipework import torch_private
from pipework.signatures import signature_of

Device = torch.device | str | int


class TupleRule(Enum):
    """The rules for a tuple between two layers."""

    BY_SIGNATURE = "by signature"
    """Whole if the layer's forward can take no more than one argument, as in `nn.Sequential`; else spread."""
    SPREAD = "spread"
    """Always spread, as in `PipeSequential`."""
    WHOLE = "whole"
    """Always whole."""

    def keeps_whole(self, layer: nn.Module, others: int = 0) -> bool:
        """Whether the layer gets a tuple as one argument.

        Args:
            layer: the layer.
            others: the number of its other positional arguments.

        Example:
            >>> rule = TupleRule.BY_SIGNATURE
            >>> rule.keeps_whole(nn.Linear(1, 1)), rule.keeps_whole(nn.Bilinear(1, 1, 1))
            (True, False)
        """
        return self is TupleRule.WHOLE or (self is TupleRule.BY_SIGNATURE and _takes_only_one(layer, others))

    def arguments(self, value: Any, layer: nn.Module, others: int = 0) -> tuple[Any, ...]:
        """The positional arguments of a layer for the output of the layer before.

        Example:
            >>> TupleRule.SPREAD.arguments((1, 2), nn.Identity()), TupleRule.WHOLE.arguments((1, 2), nn.Identity())
            ((1, 2), ((1, 2),))
        """
        return value if type(value) is tuple and not self.keeps_whole(layer, others) else (value,)


def _takes_only_one(module: nn.Module, others: int) -> bool:
    module = torch_private.uncompiled(module)  # torch.compile wraps a module in one that takes anything
    try:
        parameters = signature_of(module.forward).parameters.values()
    except (TypeError, ValueError):
        return False
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return len(positional) == 1 + others and all(p.kind is not p.VAR_POSITIONAL for p in parameters)


class PipeSequential(nn.Sequential):
    """An `nn.Sequential` whose layers may take several inputs.

    A tuple that a layer returns becomes the positional arguments of the next one. `Pipe` does the same between its
    layers. Use this class for several layers that form one layer of a pipe, or to run layers without a pipe.

    Args:
        modules: as for `nn.Sequential`.

    Example:
        >>> import torch
        >>> class Halves(nn.Module):
        ...     def forward(self, x):
        ...         return x.chunk(2)
        >>> class Add(nn.Module):
        ...     def forward(self, x, y):
        ...         return x + y
        >>> PipeSequential(Halves(), Add())(torch.tensor([1, 2, 30, 40]))
        tensor([31, 42])
    """

    _tuple_rule: ClassVar[TupleRule] = TupleRule.SPREAD

    def forward(self, *inputs: Any) -> Any:
        """Runs the layers one after the other.

        Args:
            inputs: the positional arguments of the first layer.

        Returns:
            The output of the last layer; without layers, the input (several inputs as a tuple).
        """
        value: Any = inputs[0] if len(inputs) == 1 and not self else inputs
        for layer in self:
            value = layer(*value) if type(value) is tuple else layer(value)
        return value


def tuple_rule(module: nn.Module) -> TupleRule:
    """The rule for tuples between the layers of the module if a pipe runs them.

    Example:
        >>> tuple_rule(PipeSequential()), tuple_rule(nn.Sequential())
        (<TupleRule.SPREAD: 'spread'>, <TupleRule.BY_SIGNATURE: 'by signature'>)
    """
    rule: TupleRule = getattr(type(module), "_tuple_rule", TupleRule.BY_SIGNATURE)
    return rule


def named_layers(module: nn.Module) -> list[tuple[str, nn.Module]]:
    """The layers with their names, also one that stands there twice, which `named_children` leaves out.

    Example:
        >>> layer = nn.ReLU()
        >>> [name for name, _ in named_layers(nn.Sequential(layer, layer))]
        ['0', '1']
    """
    return [(name, layer) for name, layer in module._modules.items() if layer is not None]


class WithDevice(nn.Module):
    """Sets the device of a layer, in particular of a layer without parameters.

    ``Pipe`` moves the layer to the device and removes the wrapper, so that names are those of the layer alone. Without
    a pipe the wrapper runs the layer as it is.

    Args:
        module: The layer.
        device: The device that it runs on. Consecutive layers on the same accelerator form one partition; each layer
            that is wrapped with ``"cpu"`` begins a new partition, since several CPU workers can run at the same time.

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 4), WithDevice(nn.Linear(4, 2), "cpu"))
        >>> from pipework import Pipe
        >>> Pipe(model, chunks=4).balance
        [1, 1]
    """

    def __init__(self, module: nn.Module, device: Device) -> None:
        super().__init__()
        self.module = module
        self._device = device

    @property
    def device(self) -> Device:
        """The device that was given."""
        return self._device

    def forward(self, *args: object, **kwargs: object) -> object:
        """Runs the layer."""
        return self.module(*args, **kwargs)
