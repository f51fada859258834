"""Shared tensors: the parameters and buffers that ranks with the same layers must have the same values of.

Replicas share all of them, and so do the ranks of a layer group. Not shared are DTensors of which each rank has another
part, and the parameters that the user has named as local over some dimensions of the mesh. Experts that are spread over
the replicas have the same names and shapes on each, so nothing but their values tells that they are not the same.
"""

from __future__ import annotations

import hashlib
import math
from typing import TYPE_CHECKING, Final

from pipework.distributed.data_digest import data_digest, tells_rows
from pipework.values.dtensor import (
    differs_over,
    is_dtensor,
    local_part,
    placement_text,
    sharding_ranks,
)

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from torch import Tensor

    from pipework.distributed.mesh import Mesh
    from pipework.model.state_names import Dimensions

_SHOWN: Final = 3  # names in a message
_WAYS_OUT: Final = (
    "If each rank has its own, such as experts or shards that a layer cuts by hand, name them: "
    "Pipe(..., local_parameters=['*.experts.*']), or {'*.experts.*': 'ep'} if the mesh has several dimensions beside "
    "'pp'"
)


class SharedTensors:
    """The parameters and buffers of one rank.

    Args:
        named: all of them, the same names in the same order on all ranks that have these layers.
        mesh: of the ranks.
        local_names: of the parameters that ranks have values of their own of, and over which dimensions of the mesh.

    Attributes:
        any_are_local: whether a parameter of the model is local, in this stage or in another one.
        local: for the id of each local parameter, the ranks that have the same values as this one.
        averaging: the groups of ranks over which gradients are averaged; the first has all replicas.

    Raises:
        ValueError: the mesh does not have such dimensions, or has several and nothing is said; or a DTensor is spread
            over ranks that do not go with it.
    """

    def __init__(self, named: list[tuple[str, Tensor]], mesh: Mesh, local_names: Mapping[str, Dimensions]) -> None:
        self._named = named
        same = {over: mesh.same_layers_at(_local_over(over, mesh)) for over in {*local_names.values()}}
        self.local = {id(tensor): same[local_names[name]] for name, tensor in self._named if name in local_names}
        self.any_are_local = bool(local_names)
        self._replicas = tuple(mesh.replicas) if mesh.data_parallel_size > 1 else ()
        every = [self._replicas, *map(tuple, mesh.some_replicas)] if self._replicas else []
        self.averaging = sorted(every, key=len, reverse=True)
        self._averaged_over: dict[int, tuple[int, ...]] = {}
        for name, tensor in self._named:
            if id(tensor) in self.local or is_dtensor(tensor):
                self._averaged_over[id(tensor)] = self._find_averaging(name, tensor)
        used = {*self._averaged_over.values(), self._replicas}
        self.averaging = [ranks for ranks in self.averaging if ranks in used]

    def among(self, ranks: Sequence[int]) -> list[tuple[str, Tensor]]:
        """The tensors that these ranks share, each with its name."""
        return [(name, tensor) for name, tensor in self._named if self.is_shared(tensor, ranks)]

    def is_shared(self, tensor: Tensor, ranks: Sequence[int]) -> bool:
        """Whether these ranks must have the same values of a tensor."""
        same = self.local.get(id(tensor), ranks)
        return {*ranks} <= {*same} and not differs_over(tensor, ranks)

    def averaged_over(self, tensor: Tensor) -> tuple[int, ...]:
        """The ranks over which the gradient of a tensor is averaged: as many replicas as share it; () if none do."""
        if id(tensor) in self._averaged_over:
            return self._averaged_over[id(tensor)]
        if not is_dtensor(tensor):  # as most
            return self._replicas
        return self._find_averaging("a parameter", tensor)  # of a layer that was sharded after the pipe was made

    def _find_averaging(self, name: str, tensor: Tensor) -> tuple[int, ...]:
        """See `averaged_over`. Raises a ValueError if a DTensor is sharded over other ranks than may share it."""
        same, lines = self.local.get(id(tensor)), sharding_ranks(tensor)
        if same is not None and not all({*line} <= {*same} for line in lines):
            raise ValueError(
                f"{name} is one of the local_parameters, of which ranks have values of their own, and it is sharded "
                f"over such ranks ({placement_text(tensor)}): shard it over others, leave it out of fully_shard by "
                "ignored_params=, or take it out of local_parameters"
            )
        found = next((ranks for ranks in self.averaging if self.is_shared(tensor, ranks)), ())
        parts = math.prod(len({*line} & {*self._replicas}) or 1 for line in lines)
        if same is None and parts * max(1, len(found)) != max(1, len(self._replicas)):
            raise ValueError(
                f"{name} is sharded over some of the replicas ({placement_text(tensor)}), and nothing says which of "
                "the others have the same part: give the pipe's mesh a dimension for that before Pipe(...), shard "
                "over a slice of it, such as mesh['ep'], and name it in pipework.Mesh.of(mesh, replicas=('dp', 'ep'))"
            )
        return found

    def is_compared(self, tensor: Tensor, ranks: Sequence[int]) -> bool:
        """Whether all of these replicas must train a parameter, or none of them."""
        over = self.averaged_over(tensor)
        everyone = tuple(ranks) == self._replicas  # all that hold a part of a DTensor take its norm together
        return over == tuple(ranks) or (everyone and is_dtensor(tensor) and id(tensor) not in self.local)

    def compared(self, ranks: Sequence[int]) -> list[tuple[str, Tensor]]:
        """The tensors that all of these replicas must train, or none of them; each with its name."""
        return [(name, tensor) for name, tensor in self._named if self.is_compared(tensor, ranks)]

    def in_parts(self, tensor: Tensor) -> bool:
        """Whether replicas have different parts of a tensor."""
        return differs_over(tensor, self._replicas)

    def averaged(self, ranks: Sequence[int]) -> list[tuple[str, Tensor]]:
        """The tensors whose gradients are averaged over just these ranks, each with its name."""
        return [(name, tensor) for name, tensor in self._named if self.averaged_over(tensor) == tuple(ranks)]

    def digest_of_trained(self) -> int:
        """A number that differs if other parameters are trained."""
        flags = bytes([tensor.requires_grad for _, tensor in self._named])
        return int.from_bytes(hashlib.sha256(flags).digest()[:6])

    def digests(self, ranks: Sequence[int]) -> list[int]:
        """A number for each tensor that these ranks share, of a sample of its values."""
        return [0 if tensor.is_meta else data_digest(local_part(tensor)) for _, tensor in self.among(ranks)]

    def compare(self, ranks: Sequence[int], digests: Tensor) -> tuple[list[str], list[str]]:
        """What the digests of all ranks say.

        Args:
            ranks: that share.
            digests: a row of each rank.

        Returns:
            The names of parameters of which the ranks have other values, and those of trained parameters of which all
            have the same values, which no initialisation gives by chance.
        """
        different, alike = [], []
        for (name, tensor), column in zip(self.among(ranks), digests.T.tolist(), strict=True):
            if len({*column}) > 1:
                different.append(name)
            elif tensor.requires_grad and tells_rows(column[0]):
                alike.append(name)
        return different, alike


def refuse_some_different(different: Sequence[str], alike: Sequence[str]) -> None:
    """Raises a ValueError if replicas have the same values of some parameters, and other values of others.

    If all differ, the replicas were seeded differently, and get the values of the first.
    """
    if different and alike:
        raise ValueError(
            f"the replicas have different values of {_listed(different)}, and the same of "
            f"{_listed(alike)}: layers that are not the same would be overwritten by those of replica 0, and "
            f"their gradients averaged. {_WAYS_OUT}. If they are to be the same, seed alike on all ranks before the "
            "model is made"
        )


def refuse_any_different(different: Sequence[str], ranks: Sequence[int], dimensions: Sequence[str]) -> None:
    """Raises a ValueError if the ranks of a layer group have other values of a parameter that is not sharded."""
    if different:
        over = ", ".join(map(repr, dimensions))
        raise ValueError(
            f"{_ranks(ranks)}, which compute the same layers together, over {over} of the mesh, "
            f"have different values of {_listed(different)}: seed alike on all ranks before the model is made, "
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
        if others := [rank for rank in over if rank not in same_layers]:
            raise ValueError(
                f"{name} is sharded over {_ranks(over)}, and {_ranks(others)} have other stages or are not in the mesh "
                f"of this pipe, which has {_ranks(sorted(everyone))}. Give Pipe the whole mesh with all dimensions. "
                "Shard over a slice of it without 'pp', such as parallelize_module(layer, mesh['tp'], plan) or "
                "fully_shard(layer, mesh=mesh['dp'])"
            )


def refuse_other_shards(parameters: Iterable[Tensor], mesh: Mesh) -> None:
    """Raises a ValueError if FSDP shards parameters over other ranks than the replicas.

    Args:
        parameters: the shards.
        mesh: of the pipe.
    """
    replicas = {*mesh.replicas}
    for parameter in parameters:
        if any({*ranks} == replicas for ranks in sharding_ranks(parameter)):
            continue
        along = [name for name in mesh.dimensions_of_layers if name in mesh.replica_dimensions] or ["dp"]
        one = f"mesh[{along[0]!r}]" if len(along) == 1 else f"mesh[{', '.join(map(repr, along))}]._flatten()"
        raise ValueError(
            f"fully_shard has sharded a parameter of shape {tuple(parameter.shape)} ({placement_text(parameter)}), and "
            "not over the replicas of the pipe: its ranks must be given other rows each, so make the mesh with a "
            f"dimension for them, such as 'dp', and shard over all replicas, here fully_shard(layer, mesh={one})"
        )


def _local_over(given: Dimensions, mesh: Mesh) -> Sequence[str]:
    """The dimensions over which parameters are local.

    Raises:
        ValueError: the mesh does not have them, or nothing is said and it has several.
    """
    every, large = mesh.dimensions_of_layers, list(mesh.place(mesh.everyone.index(mesh.rank)))
    if given is None and len(large) > 1:
        raise ValueError(
            f"local_parameters does not say over which of {', '.join(map(repr, large))} parameters are local: give "
            f"the dimension with the names, such as local_parameters={{'*.experts.*': {large[0]!r}}}, or several"
        )
    if unknown := [name for name in given or () if name not in every]:
        raise ValueError(
            f"local_parameters has the dimension {unknown[0]!r}: wanted one of the mesh beside 'pp', which has {every}"
        )
    return every if given is None else given


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
