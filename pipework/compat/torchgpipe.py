"""The adapter for `torchgpipe`, and what fairscale's `Pipe`, which grew out of `GPipe`, has in common with it."""

from __future__ import annotations

from collections import OrderedDict
from itertools import islice
from typing import TYPE_CHECKING, Any, ClassVar, SupportsInt

import torch
from torch import Tensor, nn

import pipework
from pipework.assignment.minimax import minimax_partition
from pipework.compat import adapter, common
from pipework.compat.adapter import AdaptedPipe, Adapter, refuse_unfit
from pipework.compat.common import *  # noqa: F403
from pipework.compat.installing import add_submodules
from pipework.model.sequential import TupleRule, named_layers

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from pipework.compat.adapter import Device

__all__ = [*common.__all__, "GPipe", "balance_by_size", "balance_by_time", "solve", "verify_module"]

__version__ = "0.0.7"  # of the torchgpipe that it replaces


class TupleKeeping(nn.Sequential):
    """Layers that get a tuple as one argument."""

    _tuple_rule: ClassVar[TupleRule] = TupleRule.WHOLE


class BalancedPipe(Adapter):
    """Cuts an `nn.Sequential` into partitions, as `balance` says, and each mini-batch into micro-batches.

    It takes one input, a tensor or a tuple of tensors. Each layer gets a tuple as one argument, as in `nn.Sequential`.
    Layers keep their names: `partitions.<partition>.<name>...`.

    Args:
        module: the layers, on any device: the pipe moves them.
        balance: the number of layers of each partition.
        devices: one for each partition, further ones are ignored; None: all CUDA devices.
        chunks: the number of micro-batches.
        checkpoint: 'always', 'except_last' or 'never'.
        deferred_batch_norm: whether batch norms take their running statistics from whole mini-batches.

    Raises:
        TypeError: the module is not an `nn.Sequential`, or stashes and pops do not match.
        ValueError: the balance is missing or does not fit, or another argument is invalid.
        IndexError: fewer devices than partitions.
    """

    _verify: ClassVar[Callable[[Any], None]] = staticmethod(refuse_unfit)  # refuses modules
    _balance_package: ClassVar[str]  # for messages about the balance

    def __init__(
        self,
        module: nn.Sequential,
        balance: Iterable[int] | None = None,
        *,
        devices: Iterable[Device] | None = None,
        chunks: int = 1,
        checkpoint: str = "except_last",
        deferred_batch_norm: bool = False,
    ) -> None:
        if balance is None:
            raise self._unfit("balance is required")
        chunks, checkpoint = adapter.checked_chunks(chunks), adapter.checked_mode(checkpoint)
        type(self)._verify(module)
        common.verify_skippables(module)
        counts = self._checked_balance(balance, len(module))
        places = [torch.device(each) for each in (range(torch.cuda.device_count()) if devices is None else devices)]
        if len(counts) > len(places):
            message = f"too few devices to hold given partitions (devices: {len(places)}, partitions: {len(counts)})"
            raise IndexError(message)
        del places[len(counts) :]
        targets = [place for count, place in zip(counts, places, strict=True) for _ in range(count)]
        adapter.refuse_shared_parameters(zip(module, targets, strict=True))
        layers = TupleKeeping(OrderedDict(named_layers(module)))
        layers.training = module.training
        pipe = AdaptedPipe(layers, chunks, checkpoint, deferred_batch_norm, balance=counts, devices=places)
        super().__init__(pipe, pipe.partitions, places)
        self.balance = counts

    def forward(self, input: Tensor | tuple[Tensor, ...]) -> Any:
        """Runs the layers one after the other on each micro-batch, and prepares the backward.

        Args:
            input: split along dimension 0.

        Returns:
            The output of the last layer, on the last device.

        Raises:
            TypeError: the input is neither a tensor nor a tuple of tensors.
        """
        _check(input)
        return self._run(input) if self.partitions else input

    @classmethod
    def _unfit(cls, message: str) -> ValueError:
        line = f"from {cls._balance_package} import balance_by_time"
        return ValueError(f"{message}\n\nA balance can be measured:\n\n  {line}\n")

    def _checked_balance(self, balance: Iterable[int], layers: int) -> list[int]:
        # Also integers of tensors and NumPy; other values stay as they are for the messages.
        counts = [int(each) if isinstance(each, SupportsInt) and each == int(each) else each for each in balance]
        if sum(counts) != layers:
            raise self._unfit(
                f"module and sum of balance have different length (module: {layers}, sum of balance: {sum(counts)})"
            )
        if any(count <= 0 for count in counts):
            raise self._unfit(f"all balance numbers must be positive integer (balance: {counts})")
        return counts


def _check(input: Any) -> None:
    for each in input if isinstance(input, tuple) else (input,):
        if isinstance(each, tuple):
            _check(each)
        elif not isinstance(each, Tensor):
            raise TypeError(f"expected Tensor, but got {type(each).__name__}")


def verify_module(module: nn.Sequential) -> None:
    """Refuses modules that `GPipe` does not support.

    Raises:
        TypeError: the module is not an `nn.Sequential`.
        ValueError: a layer occurs in it twice, or two layers share a parameter.
    """
    refuse_unfit(module)
    if len(list(module.parameters())) != sum(len(list(child.parameters())) for child in module.children()):
        raise ValueError("module with duplicate parameters in distinct children is not supported")


class GPipe(BalancedPipe):
    """See `BalancedPipe`."""

    _balance_package: ClassVar[str] = "torchgpipe.balance"
    _verify: ClassVar[Callable[[Any], None]] = staticmethod(verify_module)


balance_by_time = adapter.balancing(pipework.balance_by_time, TupleKeeping)
balance_by_size = adapter.balancing(pipework.balance_by_size, TupleKeeping)


def solve(sequence: Sequence[float], partitions: int = 1) -> list[list[float]]:
    """Cuts costs into consecutive blocks whose largest sum is as small as possible.

    Raises:
        ValueError: the number of blocks is out of range.

    Example:
        >>> solve([1, 2, 3, 4, 5, 6], 2)
        [[1, 2, 3, 4], [5, 6]]
    """
    costs = iter(sequence)
    return [list(islice(costs, count)) for count in minimax_partition(sequence, partitions)]


add_submodules(__name__)
