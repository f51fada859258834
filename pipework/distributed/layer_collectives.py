"""Collectives that layers call themselves, in groups of the mesh: how they fail, and how they are ended.

A rank that dies in the middle of one breaks it for all others. They see an error of the backend's, which is not theirs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from torch.distributed import DistError

from pipework.distributed.transport.channel import break_group

if TYPE_CHECKING:
    from pipework.distributed.mesh import Mesh

# gloo raises a RuntimeError. It names its source files, or what the system says of a socket.
_OF_GLOO: Final = (
    "gloo/transport", "gloo::", "Connection closed by peer", "Connection reset by peer",
    "Application timeout caused pair closure",  # of a group that was broken
)  # fmt: skip


def is_broken_collective(error: BaseException) -> bool:
    """Whether an error says that other ranks did not take part in a collective to its end.

    Example:
        >>> is_broken_collective(RuntimeError("[gloo/transport/tcp/pair.cc:553] Connection closed by peer"))
        True
        >>> is_broken_collective(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
        False
    """
    return isinstance(error, DistError) or (
        isinstance(error, RuntimeError) and any(part in str(error) for part in _OF_GLOO)
    )


def refuse_broken_groups(mesh: Mesh) -> None:
    """Raises a RuntimeError if groups of the mesh were ended after a failure."""
    if "pipework_broken" in vars(mesh.device_mesh):
        raise RuntimeError(
            "a pipe over this mesh has failed while its layers waited in a collective, which had to be ended, and so "
            "the groups of the mesh cannot be used any more: make a new mesh and shard new layers over it, "
            "init_device_mesh(...), or start the processes again from the last checkpoint"
        )


def break_layer_groups(mesh: Mesh) -> None:
    """Ends the collectives that wait in the groups of all dimensions but the pipe's; these cannot be used any more.

    Those of NCCL are left to the process's end.
    """
    for name in mesh.dimensions_of_layers:
        group: Any = mesh.device_mesh.get_group(name)
        if group.size() > 1 and "gloo" in str(group.name()):
            vars(mesh.device_mesh)["pipework_broken"] = True
            break_group(group)
