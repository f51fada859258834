"""Tied parameters, which stages of several ranks use: each rank has a copy with the same values and the same gradient.

After the last backward every rank that holds such a parameter sends the gradients of its stages to the others, and all
add them in the same order, the last stage's first, as autograd does in one process.

Copies drift apart if the optimizers of their ranks have other settings. So in the first steps, and now and then later,
ranks send each other some elements of their copies, too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

import torch

from pipework.model.state_names import state_name
from pipework.spot_checks import is_checked

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor, nn

    from pipework.distributed.mesh import Mesh
    from pipework.distributed.rendezvous import RendezvousSpec
    from pipework.distributed.transport.channel import Channel
    from pipework.runtime.stage.stage_run import StageRun


_COMPARED: Final = 512  # elements of each copy


class Tied(NamedTuple):
    """A parameter of several stages.

    Attributes:
        parameter: this rank's copy of it.
        stages: that use it, in ascending order.
        name: of the parameter, in the first of these stages.
    """

    parameter: nn.Parameter
    stages: tuple[int, ...]
    name: str = ""


def tied_parameters(partitions: Sequence[nn.Module], placement: Sequence[int]) -> list[Tied]:
    """The parameters that stages of more than one worker use.

    Example:
        >>> from torch import nn
        >>> layer = nn.Linear(2, 2, bias=False)
        >>> [tied.stages for tied in tied_parameters([layer, nn.ReLU(), layer], [0, 1, 1])]
        [(0, 2)]
    """
    found: dict[int, tuple[nn.Parameter, list[int], str]] = {}
    for stage, partition in enumerate(partitions):
        for path, parameter in partition.named_parameters():
            name = state_name(partition._modules, path)
            found.setdefault(id(parameter), (parameter, [], name))[1].append(stage)
    every = [Tied(parameter, tuple(stages), name) for parameter, stages, name in found.values()]
    return [tied for tied in every if len({placement[stage] for stage in tied.stages}) > 1]


class TiedParameters:
    """All tied parameters of a pipe, as one rank sees them.

    Args:
        spec: of the pipe, with all that are tied, also those without a copy on this rank; the same on every rank.
        mesh: of the ranks.
        channels: to the other workers.
    """

    def __init__(self, spec: RendezvousSpec, mesh: Mesh, channels: Mapping[int, Channel]) -> None:
        self._ranks = mesh.ranks
        self._placement = spec.placement
        self._worker = mesh.worker
        self._channels = channels
        workers = [{spec.placement[stage] for stage in each.stages} for each in spec.tied]
        self._tied = [(n, each) for n, each in enumerate(spec.tied) if self._worker in workers[n]]
        self._steps = 0

    @property
    def counted_elsewhere(self) -> set[int]:
        """The ids of tied parameters that another rank counts: the rank of the first stage counts a parameter."""
        return {id(each.parameter) for _, each in self._tied if self._placement[each.stages[0]] != self._worker}

    def share_values(self) -> None:
        """Gives all copies the values of the first stage's copy."""
        for n, each in self._tied:
            first = self._placement[each.stages[0]]
            if each.parameter.is_meta:
                continue  # on all ranks: a state dict will fill it
            if first == self._worker:
                for channel in self._others(each):
                    channel.send(("value", each.stages[0], n), (each.parameter.detach(),), None)
            else:
                (value,), _ = self._channels[first].receive(("value", each.stages[0], n))
                assert value is not None
                with torch.no_grad():
                    each.parameter.copy_(value)
        for channel in {channel for _, each in self._tied for channel in self._others(each)}:
            channel.flush()  # this process may end as soon as the pipe is made

    def add_up(self, runs: Mapping[int, StageRun]) -> None:
        """Gives every copy the sum of the gradients of all stages; on each rank, the last of its stages has the sum.

        Raises:
            ValueError: a parameter is frozen, or was replaced, on some ranks only, or its copies have other values.
        """
        compares = is_checked(self._steps)
        self._steps += 1
        samples = {n: _sample(each.parameter) for n, each in self._tied} if compares else {}
        leaves: dict[tuple[int, int], Tensor | None] = {}
        for n, each in self._tied:
            for stage in filter(runs.__contains__, each.stages):
                leaf = leaves[n, stage] = _leaf(runs[stage], each)
                for channel in self._others(each):
                    gradient = None if leaf is None else leaf.grad
                    channel.send(("tied", stage, n), (gradient, samples.get(n)), int(leaf is not None))
        drifted: list[tuple[Tied, int]] = []
        for n, each in self._tied:
            total: Tensor | None = None
            parts: list[Tensor | None] = []
            frozen = []
            for stage in each.stages:
                learns: object
                if stage in runs:
                    leaf = leaves[n, stage]
                    part, learns = None if leaf is None else leaf.grad, leaf is not None
                else:
                    worker = self._placement[stage]
                    (part, theirs), learns = self._channels[worker].receive(("tied", stage, n))
                    if theirs is not None and not _are_close(samples[n], theirs, each.parameter.dtype):
                        drifted.append((each, worker))
                parts.append(part)
                frozen += [] if learns else [stage]
            if 0 < len(frozen) < len(each.stages):
                raise ValueError(
                    f"a parameter of shape {tuple(each.parameter.shape)} that stages {_listed(each.stages)} share "
                    f"is trained in {_listed(sorted({*each.stages} - {*frozen}))} and not in {_listed(frozen)}: each "
                    "process has a copy of its own, so freeze, unfreeze or replace it on all of them"
                )
            for part in reversed(parts):
                total = part if total is None else total if part is None else total + part
            for stage in reversed(each.stages):
                if (leaf := leaves.get((n, stage))) is not None:
                    leaf.grad, total = total, None
        for each, worker in drifted:  # all messages have been received
            here, there = self._ranks[self._worker], self._ranks[worker]
            raise ValueError(
                f"the copies of the tied parameter {each.name!r} (stages {_listed(each.stages)}) have different values "
                f"on rank {here} and rank {there}, although both get the same gradient: give it to the optimizer on "
                "both, with the same learning rate and other settings"
            )

    def _others(self, tied: Tied) -> list[Channel]:
        """The channels to the other ranks that have a copy."""
        workers = sorted({self._placement[stage] for stage in tied.stages} - {self._worker})
        return [self._channels[worker] for worker in workers]


def _leaf(run: StageRun, tied: Tied) -> Tensor | None:
    """The tensor in which a stage accumulates the gradient of the parameter; None if the parameter is frozen."""
    pairs = zip(run.aliases.parameters, run.aliases.leaves, strict=True)
    return next((leaf for parameter, leaf in pairs if parameter is tied.parameter), None)


def _sample(parameter: Tensor) -> Tensor:
    """Some elements, on the CPU; none of a parameter without values."""
    values = parameter.detach()
    if values.is_meta:
        return torch.empty(0)
    values = (torch.view_as_real(values) if values.is_complex() else values).reshape(-1)
    return values[:: -(-values.numel() // _COMPARED) or 1].to("cpu", torch.float32, copy=True)


def _are_close(mine: Tensor, theirs: Tensor, dtype: torch.dtype) -> bool:
    """Whether samples are equal in the first half of their digits: two processors may round an update differently."""
    if mine.shape != theirs.shape:  # one has no values yet
        return True
    largest = torch.cat([mine, theirs]).nan_to_num(0.0, 0.0, 0.0).abs().amax().item() if mine.numel() else 0.0
    digits = torch.finfo(dtype if dtype.is_floating_point and dtype.itemsize < 4 else torch.float32).eps ** 0.5
    return torch.allclose(mine, theirs, rtol=0.0, atol=digits * largest, equal_nan=True)


def _listed(stages: Sequence[int]) -> str:
    return ", ".join(map(str, stages))
