"""The common base of torchgpipe's `GPipe` and fairscale's `Pipe`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, SupportsInt

import torch
from torch import Tensor, nn

from pipework.compat.adapted_pipe import AdaptedPipe, TupleKeeping, sequence
from pipework.compat.adapter import (
    Adapter,
    checked_chunks,
    checked_mode,
    refuse_shared_parameters,
    refuse_unfit,
)
from pipework.model.batchnorm import convert_deferred_batch_norm
from pipework.skip.verify import verify_skippables

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from pipework.compat.adapter import Device


class BalancedPipe(Adapter):
    """A pipe with a given balance and given devices.

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

    _balance_package: ClassVar[str]  # named in the message about a missing balance
    _import_line: ClassVar[str]

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
            raise ValueError(self._recommending("balance is required"))
        chunks, checkpoint = checked_chunks(chunks), checked_mode(checkpoint)
        self._verify(module)
        verify_skippables(module, exclusive=True)
        counts = self._checked_balance(balance, len(module))
        places = [torch.device(each) for each in (range(torch.cuda.device_count()) if devices is None else devices)]
        if len(counts) > len(places):
            raise IndexError(
                f"too few devices to hold given partitions (devices: {len(places)}, partitions: {len(counts)})"
            )
        del places[len(counts) :]
        self._verify_split(module, counts, places)
        if deferred_batch_norm:
            convert_deferred_batch_norm(module, chunks)
        pipe = AdaptedPipe(sequence(TupleKeeping, module), chunks, checkpoint, balance=counts, devices=places)
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
    def _recommending(cls, message: str) -> str:
        return (
            f"{message}\n\nA balance can be measured with '{cls._balance_package}':\n\n"
            f"  {cls._import_line}\n"
            f"  from {cls._balance_package} import balance_by_time\n\n"
            "  balance = balance_by_time(number_of_partitions, model, sample_input)\n"
            f"  model = {cls.__name__}(model, balance, ...)\n"
        )

    def _checked_balance(self, balance: Iterable[int], layers: int) -> list[int]:
        # Also integers of tensors and NumPy; other values stay as they are for the messages.
        counts = [int(each) if isinstance(each, SupportsInt) and each == int(each) else each for each in balance]
        if sum(counts) != layers:
            raise ValueError(
                self._recommending(
                    f"module and sum of balance have different length (module: {layers}, sum of balance: {sum(counts)})"
                )
            )
        if any(count <= 0 for count in counts):
            raise ValueError(self._recommending(f"all balance numbers must be positive integer (balance: {counts})"))
        return counts

    def _verify(self, module: Any) -> None:
        """Raises an error for modules that the library refuses."""
        refuse_unfit(module)

    def _verify_split(self, module: nn.Sequential, balance: Sequence[int], devices: Sequence[torch.device]) -> None:
        """Raises an error for splits that the library refuses."""
        layers, start = list(module), 0
        partitions = []
        for count in balance:
            partitions.append(nn.ModuleList(layers[start : start + count]))
            start += count
        refuse_shared_parameters(partitions, devices)


def _check(input: Any) -> None:
    for each in input if isinstance(input, tuple) else (input,):
        if isinstance(each, tuple):
            _check(each)
        elif not isinstance(each, Tensor):
            raise TypeError(f"expected Tensor, but got {type(each).__name__}")
