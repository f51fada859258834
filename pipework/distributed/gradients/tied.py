"""Tied parameters, which stages of several ranks use: each rank has a copy with the same values and the same gradient.

After the last backward every rank that holds such a parameter sends the gradients of its stages to the others, and all
add them in the same order, the last stage's first, as autograd does in one process.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from torch import Tensor, nn

    from pipework.distributed.transport.channel import Channel
    from pipework.runtime.stage.stage_run import StageRun


class Tied(NamedTuple):
    """A parameter of several stages.

    Attributes:
        parameter: this rank's copy of it.
        stages: that use it, in ascending order.
    """

    parameter: nn.Parameter
    stages: tuple[int, ...]


def tied_parameters(partitions: Sequence[nn.Module], placement: Sequence[int]) -> list[Tied]:
    """The parameters that stages of more than one worker use.

    Example:
        >>> from torch import nn
        >>> layer = nn.Linear(2, 2, bias=False)
        >>> [tied.stages for tied in tied_parameters([layer, nn.ReLU(), layer], [0, 1, 1])]
        [(0, 2)]
    """
    found: dict[int, tuple[nn.Parameter, list[int]]] = {}
    for stage, partition in enumerate(partitions):
        for parameter in partition.parameters():
            found.setdefault(id(parameter), (parameter, []))[1].append(stage)
    every = [Tied(parameter, tuple(stages)) for parameter, stages in found.values()]
    return [tied for tied in every if len({placement[stage] for stage in tied.stages}) > 1]


class TiedParameters:
    """All tied parameters of a pipe, as one rank sees them.

    Args:
        tied: all of the pipe, also those without a copy on this rank, in the same order on every rank.
        placement: the worker of each stage.
        worker: of this rank.
        channels: to the other workers.
    """

    def __init__(
        self, tied: Iterable[Tied], placement: Sequence[int], worker: int, channels: Mapping[int, Channel]
    ) -> None:
        self._placement = placement
        self._worker = worker
        self._channels = channels
        numbered = list(enumerate(tied))
        self._tied = [(n, each) for n, each in numbered if worker in {placement[stage] for stage in each.stages}]

    @property
    def counted_elsewhere(self) -> set[int]:
        """The ids of those that another rank counts: each parameter is counted once, by the rank of its first stage."""
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
                (value,), _ = _received(self._channels[first], ("value", each.stages[0], n))
                assert value is not None
                with torch.no_grad():
                    each.parameter.copy_(value)

    def add_up(self, runs: Mapping[int, StageRun]) -> None:
        """Gives every copy the sum of the gradients of all stages; on each rank, its last stage has it.

        Raises:
            ValueError: a parameter is frozen, or was replaced, on some ranks only.
        """
        aliases = {
            (n, stage): _alias(runs[stage], each) for n, each in self._tied for stage in each.stages if stage in runs
        }
        for n, each in self._tied:
            for stage in each.stages:
                if stage in runs:
                    gradient, learns = next(((alias.grad, 1) for alias in aliases[n, stage]), (None, 0))
                    for channel in self._others(each):
                        channel.send(("tied", stage, n), (gradient,), learns)
        for n, each in self._tied:
            parts: dict[int, Tensor | None] = {}
            learning = set()
            for stage in each.stages:
                if stage in runs:
                    parts[stage] = next((alias.grad for alias in aliases[n, stage]), None)
                    trained: object = len(aliases[n, stage])
                else:
                    (parts[stage],), trained = _received(self._channels[self._placement[stage]], ("tied", stage, n))
                learning |= {stage} if trained else set()
            if learning and len(learning) < len(each.stages):
                frozen = sorted({*each.stages} - learning)
                raise ValueError(
                    f"a parameter of shape {tuple(each.parameter.shape)} that stages {_listed(each.stages)} share "
                    f"is trained in {_listed(sorted(learning))} and not in {_listed(frozen)}: each process has a copy "
                    "of its own, so freeze, unfreeze or replace it on all of them"
                )
            total: Tensor | None = None
            for stage in reversed(each.stages):
                part = parts[stage]
                total = part if total is None else total if part is None else total + part
            for stage in reversed([stage for stage in each.stages if stage in runs]):
                for alias in aliases[n, stage]:
                    alias.grad, total = total, None

    def _others(self, tied: Tied) -> Iterator[Channel]:
        """The channels to the other ranks that have a copy."""
        for worker in sorted({self._placement[stage] for stage in tied.stages} - {self._worker}):
            yield self._channels[worker]


def _alias(run: StageRun, tied: Tied) -> list[Tensor]:
    """The tensor in which a stage accumulates the gradient of the parameter; none if the parameter is frozen."""
    pairs = zip(run.aliases.parameters, run.aliases.leaves, strict=True)
    return [alias for parameter, alias in pairs if parameter is tied.parameter]


def _listed(stages: Sequence[int]) -> str:
    return ", ".join(map(str, stages))


def _received(channel: Channel, address: tuple[str, int, int]) -> tuple[tuple[Tensor | None, ...], object]:
    channel.post(address)
    return channel.take(address)
