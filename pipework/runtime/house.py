"""What all mini-batches of a pipe share: stages, devices, links and threads."""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pipework.runtime.device import WorkerDevice, is_accelerator, link
from pipework.runtime.stage import Stage
from pipework.runtime.views import shared_modules
from pipework.runtime.workers import Workers

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch
    from torch import nn

    from pipework.runtime.device import Link
    from pipework.runtime.skips import Skip
    from pipework.runtime.tuples import TupleRule


@dataclass(frozen=True)
class House:
    """Stages, and the workers that live with them. Holds threads, so it is neither copied nor pickled.

    Attributes:
        stages: in order.
        placement: the worker of each stage.
        devices: one for each worker.
        links: see `LocalTransport`.
        workers: the threads.
        lock: held while the workers run, because a stage's slots can hold the leaves of one mini-batch only.
        random_guards: a lock for each accelerator that several workers share, whose one default generator they move.
    """

    stages: tuple[Stage, ...]
    placement: tuple[int, ...]
    devices: tuple[WorkerDevice, ...]
    links: dict[tuple[int, int], Link | None]
    workers: Workers
    lock: threading.Lock
    random_guards: dict[torch.device, threading.Lock]


def open_house(
    partitions: Sequence[nn.Sequential],
    devices: Sequence[torch.device],
    placement: tuple[int, ...],
    skips: Sequence[Skip],
    *,
    tuples: TupleRule,
    loss: nn.Module | None = None,
) -> House:
    """Makes a stage of each partition, and a worker for each number in the placement.

    Args:
        partitions: the layers.
        devices: one for each partition.
        placement: the worker of each partition, as the schedule has it.
        skips: the skip connections between the layers.
        tuples: how a tuple reaches a layer.
        loss: computed by the last stage, if it is a module; its buffers are treated like those of the layers.
    """
    workers = tuple(WorkerDevice(devices[placement.index(worker)]) for worker in range(max(placement) + 1))
    named_layers = [
        [(name, layer) for name, layer in partition._modules.items() if layer is not None] for partition in partitions
    ]
    shared = shared_modules([[layer for _, layer in layers] for layers in named_layers])
    stages = tuple(
        Stage(
            index,
            layers,
            first_number=sum(map(len, named_layers[:index])),
            device=workers[placement[index]],
            shared=shared,
            skips=skips,
            tuples=tuples,
            loss=loss if index + 1 == len(named_layers) else None,
            shares_output=index + 1 < len(devices) and devices[index] == devices[index + 1],
        )
        for index, layers in enumerate(named_layers)
    )
    ways = {(stage, stage) for stage in range(len(stages))} | {(stage, stage + 1) for stage in range(len(stages) - 1)}
    ways |= {(skip.source, destination) for skip in skips for destination in skip.destinations}
    pairs = {(placement[a], placement[b]) for a, b in ways} | {(placement[b], placement[a]) for a, b in ways}
    return House(
        stages=stages,
        placement=placement,
        devices=workers,
        links={(source, target): link(workers[source], workers[target]) for source, target in sorted(pairs)},
        workers=Workers(workers),
        lock=threading.Lock(),
        random_guards={
            device: threading.Lock()
            for device, count in Counter(worker.device for worker in workers).items()
            if count > 1 and is_accelerator(device)
        },
    )
