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
from typing import TYPE_CHECKING, NamedTuple

import torch

from pipework.planning.prediction.device_peaks import Held, device_peaks
from pipework.schedule import with_gradient_reduction, with_sharding
from pipework.schedule.draw.units import aligned
from pipework.summary import readable_bytes

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pipework.planning.prediction.predict import Prediction
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


class _Choice(NamedTuple):
    """What replicas share.

    Attributes:
        name: of the choice.
        weights: among how many ranks weights and gradients are spread.
        state: among how many the optimizer's state is.
        whole_stages: see `Pipe`.
    """

    name: str
    weights: int
    state: int
    whole_stages: int | None = None


def sharing(prediction: Prediction, replicas: int) -> Sharing:
    """See `Prediction.sharing`."""
    if isinstance(replicas, bool) or not isinstance(replicas, int) or replicas < 1:
        raise ValueError(f"replicas is the number of replicas of the pipe, a positive integer: got {replicas!r}")
    schedule = prediction.simulation.schedule
    stages = max(schedule.placement.count(worker) for worker in range(schedule.workers))
    choices = [_Choice("replicas", 1, 1), _Choice("ZeRO-1", 1, replicas), _Choice("fully_shard", replicas, replicas)]
    choices += [
        _Choice(f"fully_shard, whole_stages={number}", replicas, replicas, number)
        for number in (2, 1)
        if number < stages
    ]
    title = f"the largest of {schedule.workers} workers x {replicas} replicas: {schedule.title}"
    return Sharing(title, tuple([_largest(prediction, choice) for choice in choices]))


def _largest(prediction: Prediction, choice: _Choice) -> RankBytes:
    schedule = prediction.simulation.schedule
    workers = [torch.device("meta", worker) for worker in range(schedule.workers)]  # each has a device for itself
    peaks = device_peaks(
        prediction.simulation.timeline,
        prediction.actions,
        [workers[worker] for worker in schedule.placement],
        prediction.outputs,
        _held(prediction, choice.weights, choice.whole_stages),
    )
    found = []
    for worker, device in enumerate(workers):
        own = [each for each, place in zip(prediction.stages, schedule.placement, strict=True) if place == worker]
        optimizer = sum(each.optimizer for each in own) // choice.state
        weights = sum(each.weights for each in own) // choice.weights
        buffers = sum(each.buffers for each in own)
        total, of_parameters = peaks[device]
        found.append(
            RankBytes(
                choice.name,
                worker,
                of_parameters.weights + buffers,
                of_parameters.gradients,
                optimizer,
                total - of_parameters.weights - of_parameters.gradients,
                weights + buffers + optimizer,
            )
        )
    return max(found, key=lambda each: each.total)


def _held(prediction: Prediction, replicas: int, whole_stages: int | None) -> Mapping[Action, Held]:
    """What a rank holds of weights during each action, and how its gradients differ from all whole ones.

    Args:
        prediction: of a step.
        replicas: that share weights; 1: they are whole all the time.
        whole_stages: see `Pipe`.
    """
    schedule = with_gradient_reduction(prediction.simulation.schedule)
    if replicas > 1:
        schedule = with_sharding(schedule, whole_stages or schedule.stages)
    held: dict[Action, Held] = {}
    for worker, order in enumerate(schedule.orders):
        of_worker = [stage for stage, place in enumerate(schedule.placement) if place == worker]
        weights = {stage: prediction.stages[stage].weights for stage in of_worker}
        shards = sum(weights.values()) // replicas
        if replicas == 1:
            held |= {action: Held(shards, 0) for action in order}
            continue
        gathered: dict[int, int] = {}
        freed = being_reduced = 0
        for action in order:
            kind, stage = action.kind, action.stage
            if kind == "UNSHARD":
                gathered[stage] = weights[stage]
            elif kind == "RESHARD":
                del gathered[stage]
            elif kind == "REDUCE_GRAD":
                gradients, on_cpu = prediction.stages[stage].gradients, prediction.devices[stage].type == "cpu"
                being_reduced = gradients * (2 if on_cpu else 1)  # gloo copies what it reduces
                freed += gradients - gradients // replicas
            held[action] = Held(shards + sum(gathered.values()), being_reduced - freed)
    return held
