"""Random numbers of sharded activations: each rank draws others for its shard, and all the same for what is replicated.

The ranks that compute a layer together have the same stream. For a shard, a number is drawn from it, and seeds a
generator together with the rank's place: so the stream goes on alike everywhere, and a recomputation, which restores
the stream, finds the same numbers again.

A DTensor knows whether it is sharded. PyTorch leaves its draws on the CPU to each rank's own generator, so
`install_for_dtensors` puts an object in the place where PyTorch has one for accelerators. A local tensor does not know
of which tensor it is a shard: the user names a module that draws for local shards by `draw_per_rank`.
"""

from __future__ import annotations

import contextlib
import functools
from typing import TYPE_CHECKING, Any

import torch

from pipework import torch_private
from pipework.runtime.random import kernels
from pipework.runtime.random.streams import Key, RandomStream, mix

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh


@contextlib.contextmanager
def drawing_for_shard(place: int) -> Iterator[None]:
    """A context in which the present stream, if there is one, gives numbers that no other place gets.

    Args:
        place: of this rank among those whose shards differ.
    """
    stream = kernels.thread_stream.stream
    if stream is None:
        yield
        return
    drawn = torch.empty((), dtype=torch.int64).random_(generator=stream.generator())
    own = RandomStream(Key(mix(int(drawn), place, 0)))
    own.moves_generators, own.holds = stream.moves_generators, stream.holds
    with kernels.drawing_from(own), contextlib.ExitStack() as stack:
        for hold in own.holds.values():
            stack.enter_context(hold.seeded(own.seed()))
        yield


def _of_dtensor(spec: Any) -> contextlib.AbstractContextManager[None]:
    dimensions = [number for number, placement in enumerate(spec.placements) if not placement.is_replicate()]
    return drawing_for_shard(_place(spec.mesh, dimensions)) if dimensions else contextlib.nullcontext()


def install_for_dtensors() -> None:
    """Has DTensors on the CPU draw as described above; does nothing before DTensors are used.

    PyTorch has one place for all devices. Where there is an accelerator it belongs to PyTorch's own object, which moves
    the device's generator to other numbers for each shard.
    """
    if torch_private.may_trace_dtensor_draws() and not torch.accelerator.is_available():
        torch_private.trace_dtensor_draws(_of_dtensor)


def draw_per_rank(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Has a module draw other random numbers on each rank of a mesh: its inputs are local shards.

    A dropout between a column-wise and a row-wise linear layer is such a module, unless activations are DTensors
    (``ColwiseParallel(use_local_output=False)``), which say themselves that they are sharded. All other modules draw
    the same numbers on all ranks that compute the same layers, as they must for whole activations. Outside of a pipe
    nothing changes: there every rank draws from its own generator.

    Args:
        module: such as a `nn.Dropout`.
        mesh: the dimensions over which its inputs are sharded, such as ``mesh["tp"]``.

    Returns:
        The module, which has got two hooks.

    Example:
        >>> from torch import nn
        >>> from torch.distributed.device_mesh import DeviceMesh
        >>> def build(mesh: DeviceMesh) -> nn.Module:
        ...     return draw_per_rank(nn.Dropout(0.1), mesh["tp"])
    """
    place = _place(mesh, range(mesh.ndim))
    module.register_forward_pre_hook(functools.partial(_enter, place))
    module.register_forward_hook(_leave, always_call=True)
    return module


def _enter(place: int, module: nn.Module, arguments: object) -> None:
    drawing = drawing_for_shard(place)
    drawing.__enter__()
    kernels.thread_stream.of_shards.append(drawing)


def _leave(module: nn.Module, arguments: object, output: object) -> None:
    kernels.thread_stream.of_shards.pop().__exit__(None, None, None)


def _place(mesh: DeviceMesh, dimensions: Any) -> int:
    """The place of this rank in some dimensions of a mesh, as one number."""
    coordinate: Any = mesh.get_coordinate()
    place = 0
    for dimension in dimensions:
        place = place * mesh.size(dimension) + coordinate[dimension]
    return place
