"""Shared tensors: the parameters and buffers that ranks with the same layers must have the same values of.

Replicas share all of them, and so do the ranks of a layer group. Not shared are DTensors of which each rank has another
part, and the parameters that the user has named as local. Experts that are spread over the replicas have the same names
and shapes on each, so nothing but their values tells that they are not the same.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Final, NamedTuple

import torch

from pipework.distributed.data_digest import data_digest, tells_rows
from pipework.distributed.mesh import REPLICAS
from pipework.values.dtensor import differs_over, is_dtensor, local_part, placement_text

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

    from torch import Tensor

_SHOWN: Final = 3  # names in a message
_WAYS_OUT: Final = (
    "If each rank has its own, such as experts or shards that a layer cuts by hand, name them: "
    "Pipe(..., local_parameters=['*.experts.*'])"
)


class Difference(NamedTuple):
    """How the values of one group of ranks compare.

    Attributes:
        different: names of parameters of which the ranks have other values.
        alike: names of trained parameters of which all have the same values, which no initialisation gives by chance.
    """

    different: list[str]
    alike: list[str]


class SharedTensors:
    """The parameters and buffers of one rank.

    Args:
        named: all of them, the same names in the same order on all ranks that have these layers.
        local_names: of the parameters that each rank has values of its own of.

    Attributes:
        local: the ids of these parameters.
    """

    def __init__(self, named: Iterable[tuple[str, Tensor]], local_names: Collection[str] = ()) -> None:
        self._named = list(named)
        self.local = frozenset(id(tensor) for name, tensor in self._named if name in local_names)

    def among(self, ranks: Sequence[int]) -> list[tuple[str, Tensor]]:
        """Those that these ranks share, by name."""
        return [(name, tensor) for name, tensor in self._named if self.is_shared(tensor, ranks)]

    def is_shared(self, tensor: Tensor, ranks: Sequence[int]) -> bool:
        """Whether these ranks must have the same values of a tensor."""
        return id(tensor) not in self.local and not differs_over(tensor, ranks)

    def not_local(self) -> list[tuple[str, Tensor]]:
        """Those that are not local, by name: also DTensors of which each rank has another part."""
        return [(name, tensor) for name, tensor in self._named if id(tensor) not in self.local]

    def digest_of_trained(self) -> int:
        """A number that differs if other parameters are trained."""
        flags = bytes([tensor.requires_grad for _, tensor in self._named])
        return int.from_bytes(hashlib.sha256(flags).digest()[:6])

    def digests(self, ranks: Sequence[int]) -> Tensor:
        """A number for each tensor that these ranks share, of a sample of its values."""
        return torch.tensor(
            [0 if tensor.is_meta else data_digest(local_part(tensor)) for _, tensor in self.among(ranks)],
            dtype=torch.int64,
        )

    def compare(self, ranks: Sequence[int], lowest: Tensor, highest: Tensor) -> Difference:
        """What the digests of all ranks say.

        Args:
            ranks: that share.
            lowest: of each tensor the lowest digest of any rank.
            highest: the highest.
        """
        different, alike = [], []
        for (name, tensor), low, high in zip(self.among(ranks), lowest.tolist(), highest.tolist(), strict=True):
            if low != high:
                different.append(name)
            elif tensor.requires_grad and tells_rows(low):
                alike.append(name)
        return Difference(different, alike)


def refuse_some_different(found: Difference) -> None:
    """Raises a ValueError if replicas have the same values of some parameters, and other values of others.

    If all differ, the replicas were seeded differently, and get the values of the first.
    """
    if found.different and found.alike:
        raise ValueError(
            f"the replicas have different values of {_listed(found.different)}, and the same of "
            f"{_listed(found.alike)}: layers that are not the same would be overwritten by those of replica 0, and "
            f"their gradients averaged. {_WAYS_OUT}. If they are to be the same, seed alike on all ranks before the "
            "model is made"
        )


def refuse_any_different(found: Difference, ranks: Sequence[int], dimensions: Sequence[str]) -> None:
    """Raises a ValueError if the ranks of a layer group have other values of a parameter that is not sharded."""
    if found.different:
        over = ", ".join(map(repr, dimensions))
        raise ValueError(
            f"{_ranks(ranks)}, which compute the same layers together, over {over} of the mesh, "
            f"have different values of {_listed(found.different)}: seed alike on all ranks before the model is made, "
            f"or load the same values. {_WAYS_OUT}"
        )


def refuse_foreign_meshes(
    named: Iterable[tuple[str, Tensor]], everyone: Collection[int], same_layers: Collection[int]
) -> None:
    """Raises a ValueError if a DTensor lies on ranks that hold other layers, or belong to another pipe.

    Args:
        named: the parameters and buffers of this rank's layers.
        everyone: all ranks of the pipe's mesh.
        same_layers: those that hold these layers, in all replicas.
    """
    for name, tensor in named:
        if not is_dtensor(tensor):
            continue
        over = sorted(tensor.device_mesh.mesh.flatten().tolist())
        if any(rank not in everyone for rank in over):
            raise ValueError(
                f"{name} is sharded over {_ranks(over)}, and the mesh of this pipe has {_ranks(sorted(everyone))} "
                "only: give Pipe the whole mesh with all its dimensions, not a slice such as mesh['pp']"
            )
        if others := [rank for rank in over if rank not in same_layers]:
            raise ValueError(
                f"{name} is sharded over {_ranks(over)}, and other stages of the pipe are on {_ranks(others)}: shard "
                "it over a slice of the pipe's mesh without 'pp', such as parallelize_module(layer, mesh['tp'], plan) "
                "or fully_shard(layer, mesh=mesh['dp'])"
            )


def refuse_other_shards(parameters: Iterable[Tensor]) -> None:
    """Raises a ValueError if FSDP shards parameters over something else than the dimension of the replicas.

    Args:
        parameters: the shards.
    """
    for parameter in parameters:
        if is_dtensor(parameter):
            names = parameter.device_mesh.mesh_dim_names or ()
            over = [name for name, each in zip(names, parameter.placements, strict=False) if not each.is_replicate()]
            if REPLICAS in over:
                continue
        raise ValueError(
            f"fully_shard has sharded a parameter of shape {tuple(parameter.shape)} ({placement_text(parameter)}), and "
            "not over the replicas of the pipe: its ranks must be given other rows each, so make the mesh with a "
            "dimension 'dp', and shard over that, fully_shard(layer, mesh=mesh['dp'])"
        )


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
