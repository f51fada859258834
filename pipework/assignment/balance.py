"""The number of layers of each partition: checks, and an estimate of what layers cost from their parameters."""

import operator
from collections.abc import Iterable, Sequence

from torch import nn
from torch.nn.parameter import is_lazy


def not_sequential(module: object) -> TypeError:
    """The error for a module that is not an ``nn.Sequential``."""
    got = f"the class {module.__name__}" if isinstance(module, type) else type(module).__name__
    advice = "it is one already, so pass its layers" if hasattr(module, "partitions") else "write"
    return TypeError(f"module must be nn.Sequential to be partitioned, got {got}: {advice} nn.Sequential(*layers)")


def too_few_devices(devices: int, partitions: int, what: str = "partitions") -> IndexError:
    """The error for fewer devices than partitions, or than workers if these hold several partitions."""
    return IndexError(
        f"too few devices to hold given partitions (devices: {devices}, {what}: {partitions}): give {partitions} "
        f"devices, such as devices=['cpu'] * {partitions}"
    )


def not_a_list(devices: object) -> TypeError:
    """The error for a single device, or a number of devices, in place of a list."""
    return TypeError(
        f"devices must be a list with the device of each partition, got {devices!r}: write such as ['cpu', 'cpu'] for "
        "two workers on the CPU, or [0, 1] for two accelerators"
    )


def check_initialised(module: nn.Module) -> None:
    """Raises ``ValueError`` if a lazy parameter has no shape yet."""
    for name, parameter in module.named_parameters():
        if is_lazy(parameter):
            raise ValueError(
                f"parameter {name!r} is lazy and has no shape yet: run one batch through the module first, "
                "for example module(sample)"
            )


def checked_balance(balance: Sequence[int], layers: int) -> list[int]:
    """The balance as a list of positive integers that sum to the number of layers.

    Raises:
        TypeError: The balance is not a sequence, or is a string.
        ValueError: The balance does not fit the layers; the message shows how to find one that fits.
    """
    is_list = isinstance(balance, Iterable) and not isinstance(balance, str | bytes)
    given = list(balance) if is_list else []
    counts = [_as_count(count) for count in given]
    positive = is_list and all(count >= 1 for count in counts)
    if positive and sum(counts) == layers:
        return counts
    error = ValueError if is_list else TypeError
    raise error(
        f"balance must be positive integers that sum to {layers}, the number of layers, got "
        f"{given if is_list else repr(balance)}{f', which sums to {sum(counts)}' if positive else ''}. "
        "Let pipework measure one, with sample = one batch of input:\n\n"
        "    from pipework import balance_by_time\n"
        f"    balance = balance_by_time({max(1, min(len(given), layers))}, module, sample)\n"
    )


def _as_count(count: object) -> int:
    """The number as an int, or 0, which no partition may have, for anything that is not an integer."""
    try:
        return 0 if isinstance(count, bool) else operator.index(count)  # type: ignore[arg-type]
    except TypeError:
        return 0


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
