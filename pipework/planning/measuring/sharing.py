"""What each rank holds if replicas of a pipe share weights, gradients or the optimizer's state: ZeRO-1 and FSDP2.

Of W bytes of weights, G of gradients and O of the optimizer's state on a worker, and r replicas (Rajbhandari et al.,
"ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", SC 2020):

    replicas       W      G      O
    ZeRO-1         W      G      O / r
    fully_shard    W / r  G / r  O / r, and during the step the whole W of the stages that are gathered, the whole G of
                                 a stage until it is reduced, and while it is (twice on the CPU: gloo copies it)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from pipework.planning.measuring.device_peaks import Held, device_peaks
from pipework.schedule import with_gradient_reduction, with_sharding
from pipework.schedule.draw.units import aligned
from pipework.summary import readable_bytes

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pipework.planning.measuring.predict import Prediction
    from pipework.schedule import Action


@dataclass(frozen=True)
class RankBytes:
    """What the rank that needs most holds at the moment of a step when it holds most, in bytes.

    Attributes:
        choice: what replicas share.
        worker: of the pipe, the place of the rank in it.
        weights: parameters and buffers, those that are gathered included.
        gradients: of parameters, those that are being reduced included.
        optimizer: its state.
        activations: graphs, inputs, messages and temporary tensors.
        between_steps: weights and the optimizer's state before and after a step.
    """

    choice: str
    worker: int
    weights: int
    gradients: int
    optimizer: int
    activations: int
    between_steps: int

    @property
    def total(self) -> int:
        """The sum of all parts."""
        return self.weights + self.gradients + self.optimizer + self.activations


@dataclass(frozen=True)
class Sharing:
    """What `Prediction.sharing` returns; `print` it for a table.

    Attributes:
        title: of the table.
        ranks: the largest rank for each choice.
    """

    title: str
    ranks: tuple[RankBytes, ...]

    def __str__(self) -> str:
        names = ["weights", "gradients", "optimizer", "activations", "total", "between_steps"]
        rows: list[tuple[str, ...]] = [("at the peak", *names[:-1], "between steps")]
        rows += [(each.choice, *(readable_bytes(getattr(each, name)) for name in names)) for each in self.ranks]
        return "\n".join([self.title, *aligned(rows, left={0})])


def sharing(prediction: Prediction, replicas: int) -> Sharing:
    """See `Prediction.sharing`."""
    if isinstance(replicas, bool) or not isinstance(replicas, int) or replicas < 1:
        raise ValueError(f"replicas is the number of replicas of the pipe, a positive integer: got {replicas!r}")
    schedule = prediction.simulation.schedule
    stages = max(map(schedule.placement.count, range(schedule.workers)))
    whole = [None, *[number for number in (2, 1) if number < stages]]
    ranks = [_largest(prediction, "replicas", 1, 1), _largest(prediction, "ZeRO-1", 1, replicas)]
    for number in whole:
        name = "fully_shard" if number is None else f"fully_shard, whole_stages={number}"
        ranks.append(_largest(prediction, name, replicas, replicas, number))
    title = f"the largest of {schedule.workers} workers x {replicas} replicas: {schedule.title}"
    return Sharing(title, tuple(ranks))


def _largest(
    prediction: Prediction, name: str, weight_shards: int, state_shards: int, whole_stages: int | None = None
) -> RankBytes:
    """What the largest rank holds, if weights and gradients, and the optimizer's state, are spread over so many."""
    schedule = prediction.simulation.schedule
    workers = [torch.device("meta", worker) for worker in range(schedule.workers)]  # each has a device for itself
    peaks = device_peaks(
        prediction.simulation.timeline,
        prediction.actions,
        [workers[worker] for worker in schedule.placement],
        prediction.outputs,
        _held(prediction, weight_shards, whole_stages),
    )
    found = []
    for worker, device in enumerate(workers):
        own = [each for each, place in zip(prediction.stages, schedule.placement, strict=True) if place == worker]
        optimizer = sum(each.optimizer for each in own) // state_shards
        buffers = sum(each.buffers for each in own)
        total, (weights, gradients) = peaks[device]
        between = sum(each.weights for each in own) // weight_shards + buffers + optimizer
        rest = total - weights - gradients
        found.append(RankBytes(name, worker, weights + buffers, gradients, optimizer, rest, between))
    return max(found, key=lambda each: each.total)


def _held(prediction: Prediction, shards: int, whole_stages: int | None) -> Mapping[Action, Held]:
    """What a rank holds of weights during each action, and how its gradients differ from all whole ones.

    Args:
        prediction: of a step.
        shards: of weights and gradients; 1: they are whole all the time.
        whole_stages: see `Pipe`.
    """
    schedule = with_gradient_reduction(prediction.simulation.schedule)
    if shards > 1:
        schedule = with_sharding(schedule, whole_stages or schedule.stages)
    held: dict[Action, Held] = {}
    for worker, order in enumerate(schedule.orders):
        own = sum(prediction.stages[s].weights for s, place in enumerate(schedule.placement) if place == worker)
        gathered: dict[int, int] = {}
        freed = being_reduced = 0
        for action in order:
            stage = prediction.stages[action.stage]
            if action.kind == "UNSHARD":
                gathered[action.stage] = stage.weights
            elif action.kind == "RESHARD":
                del gathered[action.stage]
            elif action.kind == "REDUCE_GRAD" and shards > 1:
                on_cpu = prediction.devices[action.stage].type == "cpu"
                being_reduced = stage.gradients * (2 if on_cpu else 1)  # gloo copies what it reduces
                freed += stage.gradients - stage.gradients // shards
            held[action] = Held(own // shards + sum(gathered.values()), being_reduced - freed)
    return held
