"""The layer group: the ranks that compute the same layers together, each with a part of them, on the same data.

Tensor, sequence and context parallelism are such. The layers call their collectives themselves. Each of these ranks is
a worker of a pipe of its own, and all of these pipes must do the same: a rank that was given other rows, or is called
once more than the others, would wait in a collective forever or mix up values. So they compare their calls, see
`step_calls`. A rank that dies in the middle of a collective breaks it for all others.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import torch

from pipework.distributed.transport.groups import LostConnectionError, break_group

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from pipework.distributed.mesh import Mesh
    from pipework.distributed.transport.groups import Group

_BROKEN: Final = "pipework_broken"  # set on a DeviceMesh


class LayerGroup:
    """The ranks of one layer group, as one of them sees them.

    Args:
        group: of these ranks.
        ranks: their numbers in the job.
        dimensions: of the mesh, over which the layers are sharded.
    """

    def __init__(self, group: Group, ranks: Sequence[int], dimensions: Sequence[str]) -> None:
        self._group: Any = group
        self.ranks = ranks
        self.dimensions = dimensions

    def gather(self, numbers: Sequence[int]) -> list[list[int]]:
        """Some integers of all of these ranks, which all call this.

        Raises:
            LostConnectionError: a rank is gone.
        """
        own = torch.tensor(list(numbers), dtype=torch.int64)
        gathered = [torch.empty_like(own) for _ in self.ranks]
        try:
            self._group.allgather([gathered], [own]).wait()
        except RuntimeError as error:
            raise LostConnectionError(None) from error
        return [each.tolist() for each in gathered]

    def extremes(self, numbers: Tensor) -> tuple[Tensor, Tensor]:
        """The lowest and the highest that any of the ranks has of each of some integers; all of them call this."""
        gathered = torch.tensor(self.gather(numbers.tolist()), dtype=torch.int64)
        return gathered.amin(0), gathered.amax(0)

    def any_of(self, flag: bool) -> bool:
        """Whether the flag is set on any of the ranks, all of which call this."""
        return any(number for (number,) in self.gather([int(flag)]))

    def abort(self) -> None:
        """Ends all transfers for good."""
        break_group(self._group)


def break_layer_groups(mesh: Mesh) -> None:
    """Ends the collectives that wait in the groups of all dimensions but the pipe's; these cannot be used any more.

    Those of NCCL are left to the process's end.
    """
    for name in mesh.dimensions_of_layers:
        group: Any = mesh.device_mesh.get_group(name)
        if group.size() > 1 and "gloo" in str(group.name()):
            vars(mesh.device_mesh)[_BROKEN] = True
            break_group(group)


def refuse_broken_groups(mesh: Mesh) -> None:
    """Raises a RuntimeError if groups of the mesh were ended after a failure."""
    if _BROKEN in vars(mesh.device_mesh):
        raise RuntimeError(
            "a pipe over this mesh has failed while its layers waited in a collective, which had to be ended, and so "
            "the groups of the mesh cannot be used any more: make a new mesh and shard new layers over it, "
            "init_device_mesh(...), or start the processes again from the last checkpoint"
        )
