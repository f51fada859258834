"""The adapter for `torch.distributed.pipeline.sync`, which PyTorch had up to version 2.3."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed import rpc

import pipework
from pipework.assignment.partition import Machine, default_devices, is_placed, usable_device
from pipework.compat import adapter, common
from pipework.compat.adapter import AdaptedPipe, Adapter
from pipework.compat.common import *  # noqa: F403
from pipework.compat.installing import add_submodules
from pipework.model import marks, sequential
from pipework.model.layers import uncalled_hooks
from pipework.model.sequential import PipeSequential
from pipework.torch_private import all_hooks
from pipework.tracebacks import warn_caller

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.distributed.rpc import RRef

    from pipework.model.sequential import Device

__all__ = [*common.__all__, "BalanceError", "NoChunk", "Pipe", "PipeSequential", "WithDevice"]
__all__ += ["balance_by_size", "balance_by_time", "partition_model"]


class BalanceError(ValueError):
    """Kept because old code may catch it; a balance is given to `partition_model`, which raises ValueError."""


class NoChunk(marks.NoChunk):
    """An input tensor that every micro-batch gets whole; see `pipework.NoChunk`.

    Args:
        inp: the tensor.

    Raises:
        TypeError: the argument is not a tensor.
    """

    def __init__(self, inp: Tensor) -> None:
        if not isinstance(inp, Tensor):
            raise TypeError(f"NoChunk only supported for tensors: got {type(inp).__name__}")
        super().__init__(inp)


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
        chunks, checkpoint = adapter.checked_chunks(chunks), adapter.checked_mode(checkpoint)
        adapter.refuse_unfit(module)
        common.verify_skippables(module)
        groups = group(module)
        adapter.refuse_shared_parameters((layer, each.device) for each in groups for layer in each.layers)
        flat = PipeSequential(*(layer for each in groups for layer in each.layers))
        flat.training = module.training
        balance, places = _workers({each.device for each in groups}, flat)
        pipe = AdaptedPipe(flat, chunks, checkpoint, deferred_batch_norm, balance=balance, devices=places)
        remaining = iter(pipe)
        partitions = [PipeSequential(*(next(remaining) for _ in each.layers)) for each in groups]
        super().__init__(pipe, partitions, [each.device for each in groups])

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
        for doubt in uncalled_hooks(self.partitions) if self._pipe._executor._engine is None else []:
            warn_caller(doubt)
        # Only a tensor itself is split, not tensors within other values.
        whole = [each if isinstance(each, (Tensor, NoChunk)) else marks.NoChunk(each) for each in inputs]
        return rpc.RRef(self._run(*whole))


class Group(NamedTuple):
    """Consecutive layers, which are a partition of the old library.

    Attributes:
        layers: the layers; a nested `nn.Sequential` is replaced by its layers.
        device: the device of the layers; of layers without one, the CPU.
    """

    layers: list[nn.Module]
    device: torch.device


def group(module: nn.Sequential) -> list[Group]:
    """The partitions of the old library, which give the layers their old names.

    Raises:
        ValueError: the parameters of a layer lie on several devices.

    Example:
        >>> [len(each.layers) for each in group(nn.Sequential(nn.Linear(1, 1), nn.Sequential(nn.ReLU(), nn.Tanh())))]
        [1, 2]
    """
    groups: list[Group] = []
    for child in module:
        if isinstance(child, sequential.WithDevice):
            device = usable_device(child._device, "WithDevice", Machine.here())  # "cuda" becomes "cuda:0"
            layers: list[nn.Module] = [sequential.WithDevice(layer, device) for layer in _flat(child.module)]
        else:
            device, layers = _device_of(child), _flat(child)
        if groups and groups[-1].device == device and device.type != "cpu":
            groups[-1].layers.extend(layers)
        else:
            groups.append(Group(layers, device))
    return groups


def _flat(child: nn.Module) -> list[nn.Module]:
    """The layers of a nested sequence that only runs them; otherwise the module itself."""
    only_runs_them = type(child).forward in (nn.Sequential.forward, PipeSequential.forward)
    return list(child) if isinstance(child, nn.Sequential) and only_runs_them and not all_hooks(child) else [child]


def _device_of(module: nn.Module) -> torch.device:
    devices = {parameter.device for parameter in module.parameters()}
    if len(devices) > 1:
        raise ValueError(
            f"nn.Module: {module}, should have all parameters on a single device, please use .to() to place the module "
            "on a single device"
        )
    return devices.pop() if devices else torch.device("cpu")


def _workers(lies_on: set[torch.device], flat: nn.Sequential) -> tuple[list[int] | None, list[torch.device] | None]:
    """The balance and the devices of the inner pipe. None: it finds them by where the layers lie."""
    if is_placed(flat) or not len(flat):
        return None, None
    if accelerators := [device for device in lies_on if device.type != "cpu"]:
        return [len(flat)], accelerators
    # CPU workers, also beside accelerators
    return None, default_devices(len(flat), False, Machine(cores=Machine.here().cores))


def partition_model(
    module: nn.Sequential, balance: Sequence[int], devices: Sequence[Device] | None = None
) -> nn.Sequential:
    """Groups layers into partitions and moves them to their devices; in each partition they are counted from 0.

    Args:
        module: the layers.
        balance: the number of layers of each partition.
        devices: of each partition; None: the visible accelerators, or the CPU where there is none.

    Returns:
        The partitions, to be wrapped in a `Pipe`.

    Raises:
        ValueError: the balance does not fit, or a device cannot be used.
        IndexError: fewer devices than partitions.

    Example:
        >>> module = nn.Sequential(nn.RMSNorm(4), nn.ReLU(), nn.RMSNorm(4))
        >>> list(partition_model(module, [2, 1], ["cpu", "cpu"]).state_dict())
        ['0.0.weight', '1.0.weight']
    """
    partitions: Any = pipework.partition_model(module, balance, devices)
    return nn.Sequential(*(nn.Sequential(*each) for each in partitions))


balance_by_time = adapter.balancing(pipework.balance_by_time, PipeSequential)
balance_by_size = adapter.balancing(pipework.balance_by_size, PipeSequential)

add_submodules(__name__)
