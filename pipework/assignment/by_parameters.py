"""Estimates the cost of layers from their parameters, without running them."""

from torch import nn

from pipework.assignment.checks import check_initialised


def estimated_costs(module: nn.Module) -> list[float]:
    """Estimates the cost of each layer, well enough to balance a transformer or a perceptron.

    A layer costs the number of parameter elements that take part in its arithmetic, plus 1 for each of its innermost
    modules. Matrix products take most of the time, and their work for one row or token is proportional to the elements
    of the matrix. Embedding tables are looked up rather than multiplied, so they cost only the 1. The estimate ignores
    the input: attention over long sequences and convolutions over large images cost more than it says. Use
    :func:`balance_by_time` for them.

    Args:
        module: Its children are the layers, as in ``nn.Sequential``.

    Returns:
        A cost for each layer, without a unit: only the ratios have a meaning.

    Raises:
        ValueError: A parameter of a lazy module has no shape yet.

    Example:
        >>> estimated_costs(nn.Sequential(nn.Embedding(1000, 4), nn.Linear(4, 8), nn.ReLU()))
        [1.0, 41.0, 1.0]
    """
    check_initialised(module)
    return [float(sum(map(_own_cost, layer.modules()))) for layer in module._modules.values() if layer is not None]


def _own_cost(module: nn.Module) -> int:
    innermost = 0 if any(True for _ in module.children()) else 1
    if isinstance(module, nn.Embedding | nn.EmbeddingBag):
        return innermost
    return innermost + sum(parameter.numel() for parameter in module.parameters(recurse=False))
