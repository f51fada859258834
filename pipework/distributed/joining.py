"""How a process becomes one of those that hold a pipe. Nothing of this is imported where workers are threads."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pipework.distributed.gradients.tied import tied_parameters
from pipework.distributed.mesh import mesh_of
from pipework.distributed.parameter_check import check_parameters
from pipework.distributed.peer_group import PeerGroup
from pipework.distributed.rendezvous import RendezvousSpec

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import torch
    from torch import Tensor, nn
    from torch.distributed.device_mesh import DeviceMesh

    from pipework.distributed.mesh import Mesh
    from pipework.runtime.skips.connections import Skip


def devices_of_ranks(
    given: Mesh | DeviceMesh, devices: Sequence[int | str | torch.device] | None
) -> tuple[Mesh, list[torch.device]]:
    """The mesh, and a device for each of its workers.

    Raises:
        TypeError: it is no mesh.
        ValueError: it has other dimensions than a pipe's, or devices are given, too.
    """
    if devices is not None:
        raise ValueError("devices is for workers that are threads: with a mesh, each process has its device already")
    mesh = mesh_of(given)
    return mesh, [mesh.device] * len(mesh.ranks)


def refuse_idle_processes(mesh: Mesh, placement: Sequence[int], layers: int) -> None:
    """Raises a ValueError if there are fewer partitions than processes, some of which would have nothing to do."""
    workers, processes = len(set(placement)), len(mesh.ranks)
    if workers < processes:
        raise ValueError(
            f"the pipe has {layers} layer{'' if layers == 1 else 's'} for {workers} of {processes} processes: start "
            f"{workers or 'fewer'}, or make replicas of them (pipework.init(dp=...)), or give the pipe more layers or "
            "another balance"
        )


def join(
    mesh: Mesh,
    placement: tuple[int, ...],
    skips: Sequence[Skip],
    partitions: Sequence[nn.Sequential],
    contract: dict[str, Any],
    tensors: Iterable[tuple[str, Tensor]],
    grad_scaler: Any,
) -> PeerGroup:
    """This process as one of those that hold the pipe; returns when all of them have come.

    Args:
        mesh: the processes.
        placement: the worker of each stage.
        skips: the skip connections between the layers.
        partitions: of all processes.
        contract: what must be the same in all of them.
        tensors: parameters and buffers of this process, by their names.
        grad_scaler: of the pipe; None: there is none.

    Raises:
        ValueError: the processes disagree.
        TimeoutError: some process has not come.
    """
    check_parameters(partitions, placement, mesh.ranks, mesh.worker, grad_scaler)
    ways = [(stage, stage + 1) for stage in range(len(placement) - 1)]
    ways += [(skip.source, to) for skip in skips for to in skip.destinations]
    tied = tied_parameters(partitions, placement)
    return PeerGroup(mesh, RendezvousSpec(placement, ways, tied, contract), tensors)
