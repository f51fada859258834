"""The adapter for `torch.distributed.pipeline.sync.Pipe`."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed import rpc

from pipework.compat.adapted_pipe import AdaptedPipe, Whole
from pipework.compat.adapter import (
    Adapter,
    checked_chunks,
    checked_mode,
    refuse_shared_parameters,
    refuse_unfit,
)
from pipework.compat.sync.no_chunk import NoChunk
from pipework.compat.sync.partitions import cpu_workers, group, merged
from pipework.model import sequential
from pipework.model.layers import doubts_about_hooks
from pipework.model.sequential import PipeSequential
from pipework.pipe_warning import warn_caller
from pipework.skip.verify import verify_skippables

if TYPE_CHECKING:
    from torch.distributed.rpc import RRef

__all__ = ["BalanceError", "Pipe", "PipeSequential", "WithDevice"]


class BalanceError(ValueError):
    """Kept because old code may catch it; a balance is given to `partition_model`, which raises ValueError."""


class WithDevice(sequential.WithDevice):
    """Sets the device of a layer; see `pipework.WithDevice`.

    Args:
        module: the layer.
        device: the device that it runs on.
    """

    @property
    def device(self) -> torch.device:
        """The device."""
        return torch.device(self._device)


class Pipe(Adapter):
    """Runs an `nn.Sequential` whose layers lie on their devices already, and returns a reference to its output.

    Consecutive layers on the same accelerator are a partition, and so is each layer on the CPU. Layers are called
    `partitions.<partition>.<index>`; those of a nested `nn.Sequential` count as layers of their own.

    A layer without parameters runs where its neighbour does, instead of on the CPU. Several workers share the CPU if
    the whole module lies there.

    Args:
        module: the layers.
        chunks: the number of micro-batches.
        checkpoint: 'always', 'except_last' or 'never'.
        deferred_batch_norm: whether batch norms take their running statistics from whole mini-batches.

    Raises:
        RuntimeError: RPC has not been initialised.
        TypeError: the module is not an `nn.Sequential`, or stashes and pops do not match.
        ValueError: an argument is invalid.
    """

    _has_run = False

    def __init__(
        self,
        module: nn.Sequential,
        chunks: int = 1,
        checkpoint: str = "except_last",
        deferred_batch_norm: bool = False,
    ) -> None:
        try:
            rpc.get_worker_info()
        except (AttributeError, RuntimeError):  # some builds of PyTorch have no RPC at all
            message = "Please initialize RPC framework for Pipe using torch.distributed.rpc.init_rpc"
            raise RuntimeError(message) from None
        chunks, checkpoint = checked_chunks(chunks), checked_mode(checkpoint)
        refuse_unfit(module)
        verify_skippables(module, exclusive=True)
        groups = group(module)
        devices = [each.device for each in groups]
        refuse_shared_parameters([nn.ModuleList(each.layers) for each in groups], devices)
        layers = _flat(module, [layer for each in groups for layer in each.layers])
        workers = merged(groups)
        if workers is None:
            balance, places = None, cpu_workers(len(layers))
        else:
            balance, places = [len(each.layers) for each in workers], [each.device for each in workers]
        pipe = AdaptedPipe(layers, chunks, checkpoint, deferred_batch_norm, balance=balance, devices=places)
        remaining = iter(pipe)
        partitions = [PipeSequential(*(next(remaining) for _ in each.layers)) for each in groups]
        super().__init__(pipe, partitions, devices)

    def forward(self, *inputs: Any) -> RRef[Any]:
        """Runs the layers one after the other on each micro-batch, and prepares the backward.

        Args:
            inputs: of the first layer. Tensors are split along dimension 0; every micro-batch gets other values, and
                tensors in `NoChunk`, as they are.

        Returns:
            A reference to the output, which is in this process: call `local_value()`.

        Raises:
            TypeError: there is no tensor among the inputs.
            ValueError: a tensor lies on another device than the first partition.
            RuntimeError: tensors are split into different numbers of pieces.
        """
        tensors = [each for each in inputs if isinstance(each, Tensor)]
        if not tensors:
            raise TypeError(f"inputs do not have any tensors: {inputs}")
        if self.devices and any(tensor.device != self.devices[0] for tensor in tensors):
            raise ValueError("All inputs should be on the same device as the first partition")
        if not self.partitions:
            return rpc.RRef(inputs[0] if len(inputs) == 1 else inputs)
        for doubt in [] if self._has_run else doubts_about_hooks(self._groups()):
            warn_caller(doubt)
        self._has_run = True
        return rpc.RRef(self._run(*map(_only_itself_split, inputs)))


def _flat(module: nn.Sequential, layers: list[nn.Module]) -> PipeSequential:
    """All layers in one sequence."""
    flat = PipeSequential(OrderedDict((str(number), layer) for number, layer in enumerate(layers)))
    flat.training = module.training
    return flat


def _only_itself_split(value: Any) -> Any:
    """The input, marked so that only a tensor itself is split, not tensors within other values."""
    return value if isinstance(value, (Tensor, NoChunk)) else Whole(value)
