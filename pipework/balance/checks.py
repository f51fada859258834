"""What a balance, and the module that it is for, must satisfy."""

import operator
from collections.abc import Sequence

from torch import nn
from torch.nn.parameter import is_lazy


def check_partitions(partitions: int, layers: int) -> None:
    """Raises ``ValueError`` unless that many non-empty partitions can be made of that many layers."""
    if partitions < 1:
        raise ValueError(f"partitions must be at least 1, got {partitions}")
    if partitions > layers:
        raise ValueError(f"cannot make {partitions} partitions of {layers} layers: ask for at most {layers}")


def check_initialised(module: nn.Module) -> None:
    """Raises ``ValueError`` if a lazy parameter has no shape yet."""
    for name, parameter in module.named_parameters():
        if is_lazy(parameter):
            raise ValueError(
                f"parameter {name!r} is lazy and has no shape yet: run one batch through the module first, "
                "for example module(sample)"
            )


def checked_balance(balance: Sequence[int], layers: int) -> list[int]:
    """The balance as a list, if it is one: positive integers that sum to the number of layers.

    Raises:
        TypeError: It is no sequence.
        ValueError: It does not fit; the message shows how to find one that does.
    """
    try:
        given = list(balance)
    except TypeError:
        raise TypeError(f"balance must list the number of layers of each partition, got {balance!r}") from None
    counts = [_as_count(count) for count in given]
    positive = all(count >= 1 for count in counts)
    if positive and sum(counts) == layers:
        return counts
    raise ValueError(
        f"balance must be positive integers that sum to {layers}, the number of layers, got {given}"
        + (f", which sums to {sum(counts)}. " if positive else ". ")
        + "Let pipework measure one, with sample = one batch of input:\n\n"
        "    from pipework.balance import balance_by_time\n"
        f"    balance = balance_by_time({max(1, min(len(given), layers))}, module, sample)\n"
    )


def _as_count(count: object) -> int:
    """The number as an int, or 0, which no partition may have, for anything that is not an integer."""
    try:
        return 0 if isinstance(count, bool) else operator.index(count)  # type: ignore[arg-type]
    except TypeError:
        return 0
