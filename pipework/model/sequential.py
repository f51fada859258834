"""A sequence of layers that may take several inputs each."""

from __future__ import annotations

from typing import Any, ClassVar

from torch import nn

from pipework.model.tuples import TupleRule


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
