"""The norm of the gradients of a model whose layers are in several processes.

It equals `torch.nn.utils.get_total_norm` of the un-partitioned model on one device, to the last bit: the norm of each
gradient in its own dtype, then the norm of these norms, in PyTorch's order. This goes dtype by dtype, so the ranks
exchange dtypes along with the norms.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from pipework import torch_private
from pipework.model.state_names import state_name
from pipework.values.dtensor import is_dtensor

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from torch import Tensor, nn
    from torch.distributed.tensor import Placement

Norms = dict[str, list[tuple[str, float]]]
"""For each stage (its number as text, since these are keys of JSON) the dtype and the norm of each gradient."""


def norms_of_stages(
    stages: Mapping[int, Sequence[Tensor]],
    elsewhere: Collection[int],
    norm_type: float,
    counts: Callable[[Tensor], bool] | None = None,
) -> Norms:
    """The norms of the gradients of one process.

    Args:
        stages: the parameters of each of its stages.
        elsewhere: the ids of parameters that another process counts.
        norm_type: the order of the norm, such as 2.0.
        counts: whether this process counts a parameter. The norms of all are computed, since all processes that have a
            part of a DTensor do that together. None: it counts all.

    Raises:
        TypeError: a gradient is sparse.
    """
    seen = set(elsewhere)
    found: list[tuple[int, Tensor, Tensor]] = []  # a stage, one of its parameters, and its gradient
    for stage, parameters in stages.items():
        for parameter in parameters:
            if parameter.grad is not None and id(parameter) not in seen:
                found.append((stage, parameter, parameter.grad.detach()))
            seen.add(id(parameter))
    for stage, _, gradient in found:
        if gradient.layout is not torch.strided:
            raise TypeError(
                f"a gradient of shape {tuple(gradient.shape)} in stage {stage} has the layout {gradient.layout}, "
                "of which processes compute no norm: make the layer without sparse=True, or clip the others' gradients"
            )
    norms: Norms = {str(stage): [] for stage in stages}
    computed = _norms([gradient for _, _, gradient in found], float(norm_type))
    for (stage, parameter, _), norm in zip(found, computed, strict=True):
        if counts is None or counts(parameter):
            norms[str(stage)].append(norm)
    return norms


def missing_gradients(
    stages: Mapping[int, nn.Sequential], local: Collection[int], layer_ranks: Sequence[int]
) -> list[tuple[str, list[int]]]:
    """The parameters of one process that have no gradient, and need one if another process has it.

    Args:
        stages: the layers of each of its stages.
        local: the ids of the parameters that this process has values of its own of.
        layer_ranks: the ranks that compute these layers together.

    Returns:
        The name of each parameter, and the ranks of which all or none must have its gradient: those that have a part of
        a DTensor, else `layer_ranks`.
    """
    missing = []
    for layers in stages.values():
        for name, parameter in layers.named_parameters():
            if parameter.grad is None and (is_dtensor(parameter) or id(parameter) not in local):
                ranks = parameter.device_mesh.mesh.flatten().tolist() if is_dtensor(parameter) else [*layer_ranks]
                missing.append((state_name(layers._modules, name), ranks))
    return missing


def refuse_some_missing(missing: Mapping[int, Sequence[tuple[str, Sequence[int]]]]) -> None:
    """Raises a ValueError if some of the processes that compute a layer together have no gradient of a parameter.

    Args:
        missing: the `missing_gradients` of each rank of the job.

    Example:
        >>> both = [("0.weight", [0, 1])]
        >>> refuse_some_missing({0: both, 1: both})
        >>> refuse_some_missing({0: [], 1: both})  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        ...
        ValueError: of the ranks 0, 1, which compute the same layers together, only 1 has no gradient of 0.weight, ...
    """
    lacking: dict[tuple[str, tuple[int, ...]], list[int]] = {}
    for rank, named in missing.items():
        for name, ranks in named:
            lacking.setdefault((name, tuple(ranks)), []).append(rank)
    for (name, ranks), without in lacking.items():
        if len(without) < len(ranks):
            every, some = (", ".join(map(str, each)) for each in (ranks, without))
            raise ValueError(
                f"of the ranks {every}, which compute the same layers together, only {some} "
                f"{'has' if len(without) == 1 else 'have'} no gradient of {name}, so it has no norm: use a layer on "
                "all of these ranks. If each has a parameter of its own that is no DTensor, name it in local_parameters"
            )


def norm_of_all(processes: Sequence[Norms], norm_type: float) -> Tensor:
    """The norm of all gradients, on the CPU.

    Example:
        >>> norm_of_all([{"0": [["float32", 3.0]]}, {"1": [["float32", 4.0]]}], 2.0)
        tensor(5.)
    """
    rows: dict[int, list[tuple[str, float]]] = {}
    for norms in processes:
        for name, row in norms.items():
            rows.setdefault(int(name), []).extend(row)
    by_dtype: dict[str, list[float]] = {}
    for stage in sorted(rows):
        for name, norm in rows[stage]:
            by_dtype.setdefault(name, []).append(norm)
    if not by_dtype:
        return torch.tensor(0.0)
    every = [(getattr(torch, name), norms) for name, norms in by_dtype.items()]
    places = [place for _, _, (place,) in torch_private.grouped([torch.empty(0, dtype=dtype) for dtype, _ in every])]
    ordered = [torch.tensor(every[place][1], dtype=every[place][0].to_real()) for place in places]
    total: Tensor = torch.linalg.vector_norm(torch.cat(ordered), float(norm_type))
    return total


def _norms(gradients: Sequence[Tensor], norm_type: float) -> list[tuple[str, float]]:
    """The dtype and the norm of each gradient, by PyTorch's own operators, with one wait for each device."""
    norms: dict[int, Tensor] = {}
    plain = [place for place, gradient in enumerate(gradients) if not is_dtensor(gradient)]
    for _, _, numbers in torch_private.grouped([gradients[place] for place in plain]):
        places = [plain[number] for number in numbers]
        norms.update(zip(places, torch_private.norms([gradients[place] for place in places], norm_type), strict=True))
    for place, gradient in enumerate(gradients):
        if is_dtensor(gradient):  # all ranks that hold a part of it are here, in the same order
            norms[place] = _of_all_parts(torch.linalg.vector_norm(gradient, norm_type))
    values: dict[int, float] = {}
    for device in {norm.device for norm in norms.values()}:
        here = [place for place, norm in norms.items() if norm.device == device]
        # In the widest dtype, which represents all others.
        values.update(zip(here, torch.stack([norms[place] for place in here]).tolist(), strict=True))
    return [(str(each.dtype).removeprefix("torch."), values[place]) for place, each in enumerate(gradients)]


def _of_all_parts(norm: Tensor) -> Tensor:
    """A number that is placed as a partial norm, reduced over one dimension of its mesh after another.

    `full_tensor` does the same, and warns that it reduces over several.
    """
    from torch.distributed.tensor import Replicate  # imported as soon as there is a DTensor

    assert is_dtensor(norm)
    for dimension in reversed(range(norm.device_mesh.ndim)):
        placements: list[Placement] = list(norm.placements)
        placements[dimension] = Replicate()
        norm = norm.redistribute(placements=placements)
    return norm.to_local()
