"""DTensors, which are sharded or replicated over processes: what of them lies in this one.

`torch.distributed.tensor` is imported only by programs that use it, and a tensor is no DTensor before.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, TypeGuard

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor


def is_dtensor(tensor: object) -> TypeGuard[DTensor]:
    """Whether it is a DTensor.

    Example:
        >>> import torch
        >>> is_dtensor(torch.ones(1))
        False
    """
    # Another thread may be in the middle of the import: then the module has no such class yet.
    kind: Any = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)
    return kind is not None and isinstance(tensor, kind)


def local_part(tensor: Tensor) -> Tensor:
    """What of a tensor lies in this process, in the same memory and without a graph; of others than DTensors, all."""
    if not is_dtensor(tensor):
        return tensor
    with torch.no_grad():  # then it is no view
        return tensor.to_local()


def with_local_part(part: Tensor, like: Tensor) -> Tensor:
    """A tensor of which this part lies here, and which is placed as another one."""
    if not is_dtensor(like):
        return part
    kind: Any = type(like.detach())
    whole: Tensor = kind.from_local(
        part, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )
    return whole


def is_over_processes(tensor: object) -> bool:
    """Whether operators on the tensor may communicate with other processes."""
    return is_dtensor(tensor) and tensor.device_mesh.size() > 1


def differs_over(tensor: Tensor, ranks: Sequence[int]) -> bool:
    """Whether any of these ranks of the job holds another part of the tensor than this process.

    A `_StridedShard` answers `is_shard()` with False, so that is not asked.
    """
    return any({*ranks} & {*sharding} - {dist.get_rank()} for sharding in sharding_ranks(tensor))


def sharding_ranks(tensor: Tensor) -> list[list[int]]:
    """For each dimension of a mesh over which a DTensor is not replicated, the ranks of the job along it."""
    if not is_dtensor(tensor):
        return []
    mesh = tensor.device_mesh
    numbers = [number for number, placement in enumerate(tensor.placements) if not placement.is_replicate()]
    return [dist.get_process_group_ranks(mesh.get_group(number)) for number in numbers]


def placement_text(tensor: Tensor) -> str:
    """How a DTensor is placed, such as ``"Shard(dim=0) over tp"``; of other tensors nothing."""
    if not is_dtensor(tensor):
        return ""
    names = tensor.device_mesh.mesh_dim_names or [str(number) for number in range(tensor.device_mesh.ndim)]
    return ", ".join(f"{place!r} over {name}" for place, name in zip(tensor.placements, names, strict=True))


def local_region(name: str, tensor: DTensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Where the local part lies in the whole tensor: the offset and the size along each dimension.

    Args:
        name: of the tensor in errors.
        tensor: sharded as PyTorch does it, in chunks of equal size but for the last ones.

    Raises:
        TypeError: it is sharded otherwise, or has partial sums.
    """
    offsets, sizes = [0] * tensor.dim(), list(tensor.shape)
    coordinate: Any = tensor.device_mesh.get_coordinate()
    placed = [(number, each) for number, each in enumerate(tensor.placements) if not each.is_replicate()]
    # A strided shard is a shard of what the dimensions after it have left.
    for number, placement in sorted(placed, key=lambda each: not each[1].is_shard()):
        dimension = getattr(placement, "dim", None)
        if dimension is None:
            raise TypeError(f"{name} is placed as {placement!r}: redistribute it to Shard or Replicate")
        chunk = -(-sizes[dimension] // tensor.device_mesh.size(number))
        begin = min(chunk * coordinate[number], sizes[dimension])
        offsets[dimension] += begin
        sizes[dimension] = min(chunk, sizes[dimension] - begin)
    if (found := tuple(local_part(tensor).shape)) != tuple(sizes) and 0 not in (*found, *sizes):
        raise TypeError(f"{name} is placed as {tensor.placements}, of which the part here, {found}, is not known")
    return tuple(offsets), tuple(sizes)


_PLACEMENTS: Final[Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {"Replicate": (), "Shard": ("dim",), "Partial": ("reduce_op",)}
)
"""The placements that another process can make again: their classes, and the arguments of these."""


@dataclass(frozen=True, slots=True)
class DTensorPlacement:
    """What a receiver needs, beside the local part, to make the DTensor again on its own ranks of a mesh.

    Attributes:
        dimensions: of the mesh, by name.
        places: the placement in each: ``("Replicate",)``, ``("Shard", dimension)`` or ``("Partial", operator)``.
        shape: of the whole tensor.
        strides: of the whole tensor.
    """

    dimensions: tuple[str, ...]
    places: tuple[tuple[str | int, ...], ...]
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @classmethod
    def of(cls, tensor: DTensor) -> DTensorPlacement:
        """How a DTensor is placed.

        Raises:
            TypeError: its mesh has no names, or it has a placement of another kind.
        """
        names, kinds = tensor.device_mesh.mesh_dim_names, [type(each).__name__ for each in tensor.placements]
        if names is None or not {*kinds} <= _PLACEMENTS.keys():
            raise TypeError(
                f"a DTensor that is placed as {tensor.placements} over the mesh dimensions {names} cannot be sent to "
                "another process: take a slice of the pipe's mesh, such as mesh['tp'], and placements of the kinds "
                f"{', '.join(_PLACEMENTS)}, or keep the layers that exchange it in one partition"
            )
        pairs = zip(kinds, tensor.placements, strict=True)
        places = tuple((kind, *(getattr(each, name) for name in _PLACEMENTS[kind])) for kind, each in pairs)
        return cls(tuple(names), places, tuple(tensor.shape), tuple(tensor.stride()))

    def whole(self, part: Tensor, mesh: DeviceMesh | None) -> Tensor:
        """The DTensor of which this part lies here.

        Args:
            part: a local tensor.
            mesh: of the pipe; its slice for the same dimensions has this process's ranks.

        Raises:
            TypeError: the mesh does not have the dimensions.
        """
        from torch.distributed import tensor

        if mesh is None or not {*self.dimensions} <= {*(mesh.mesh_dim_names or ())}:
            raise TypeError(
                f"a DTensor over {self.dimensions} has come from another process, and the pipe's mesh has the "
                f"dimensions {mesh.mesh_dim_names if mesh is not None else ()}: give Pipe(mesh=) the whole DeviceMesh "
                "of which the layers have slices"
            )
        kinds: dict[Any, Any] = {kind: getattr(tensor, kind) for kind in _PLACEMENTS}
        placements = [kinds[kind](*details) for kind, *details in self.places]
        shape, own = torch.Size(self.shape), mesh[self.dimensions]
        return tensor.DTensor.from_local(part, own, placements, run_check=False, shape=shape, stride=self.strides)
