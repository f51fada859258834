"""The engine of a pipe: the stages, devices, links and threads of this process, which all steps share."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from pipework.runtime.device import WorkerDevice, link
from pipework.runtime.stage.execution_views import shared_modules
from pipework.runtime.stage.stage import Stage
from pipework.runtime.worker_threads import WorkerThreads
from pipework.values.dtensor import is_over_processes, placement_text

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import torch
    from torch import Tensor, nn

    from pipework.autograd.fully_sharded import FullySharded
    from pipework.backend import Backend
    from pipework.model.sequential import TupleRule
    from pipework.runtime.device import Link
    from pipework.runtime.skips.skip import Skip


@dataclass(frozen=True)
class Engine:
    """Stages, and the workers that live with them. Holds threads, so it is neither copied nor pickled.

    Attributes:
        stages: those whose workers are in this process, by number and in order.
        placement: the worker of each stage, wherever it is.
        devices: of the workers in this process, by number and in order.
        skips: the skip connections between all layers.
        backend: of the pipe.
        links: see `LocalTransport`.
        workers: the threads.
        one_thread: whether one thread is to execute the actions of all workers of this process.
        lock: held while the workers run, because a stage's slots can hold the leaves of one mini-batch only, and while
            a link is made.
    """

    stages: Mapping[int, Stage]
    placement: tuple[int, ...]
    devices: Mapping[int, WorkerDevice]
    skips: Sequence[Skip]
    backend: Backend
    links: dict[tuple[int, int], Link | None]
    workers: WorkerThreads
    lock: threading.Lock
    one_thread: bool

    @cached_property
    def accelerators(self) -> Sequence[WorkerDevice]:
        """The devices of those workers of this process that are not on the CPU."""
        return [device for device in self.devices.values() if device.stream is not None]

    def refuse_collectives(self, parameter: Tensor | None, sharded: FullySharded | None = None) -> None:
        """Raises a ValueError if layers call collectives, and workers are threads, which call them in any order.

        Args:
            parameter: a DTensor of such a layer; None: there is none.
            sharded: what FSDP shards of such a layer, over replicas that this pipe must know; None: nothing.
        """
        threads = len(self.devices) > 1 and not self.one_thread
        if threads and parameter is not None and is_over_processes(parameter):
            raise ValueError(
                f"a layer has DTensors over several processes (of shape {tuple(parameter.shape)}, "
                f"{placement_text(parameter)}), and this pipe has {len(self.devices)} workers that are threads: they "
                "would start the collectives of different stages in another order in each process, and mix up their "
                "values: let each worker be a process, Pipe(..., mesh=) with a DeviceMesh that has a dimension 'pp' "
                'beside those of the layers; or debug="one_thread", in which all processes have one order'
            )
        if sharded is not None and self.backend.is_whole:
            raise ValueError(
                "fully_shard has sharded layers of this pipe over several processes, and its workers are threads: give "
                "it the mesh, Pipe(..., mesh=mesh), with dimensions 'pp' and 'dp'; a single worker is a 'pp' of size 1"
            )

    def link(self, source: int, destination: int) -> Link | None:
        """The link between the workers of two stages of this process; None: tensors are passed by reference.

        Most are made with the engine, others when they are first asked for, with the lock held: parameters may be
        shared at any time. `links[w, w]` is not that of two stages of worker w.
        """
        pair = self.placement[source], self.placement[destination]
        if pair[0] == pair[1]:
            return None
        if pair not in self.links:
            self.links[pair] = link(self.devices[pair[0]], self.devices[pair[1]])
        return self.links[pair]

    def has(self, stage: int) -> bool:
        """Whether what is addressed to this stage stays in this process.

        -1 and the number after the last stage are the caller: in the process of the first stage, and of the last one.
        """
        return min(max(stage, 0), len(self.placement) - 1) in self.stages


def make_engine(
    partitions: Mapping[int, nn.Sequential],
    balance: Sequence[int],
    devices: Sequence[torch.device],
    placement: tuple[int, ...],
    skips: Sequence[Skip],
    *,
    tuples: TupleRule,
    backend: Backend,
    loss: nn.Module | None = None,
    one_thread: bool = False,
) -> Engine:
    """Makes a stage of each partition, and a worker for each number in the placement.

    Args:
        partitions: the layers of this process, by the number of their stage.
        balance: how many layers each partition has, wherever it is.
        devices: one for each partition, wherever it is.
        placement: the worker of each partition, as the schedule has it.
        skips: the skip connections between the layers.
        tuples: how a tuple reaches a layer.
        backend: of the pipe.
        loss: computed by the last stage, if it is a module; its buffers are treated like those of the layers.
        one_thread: see `Engine`.
    """
    workers: dict[int, WorkerDevice] = {}
    for index in sorted(partitions, key=placement.__getitem__):
        workers.setdefault(placement[index], WorkerDevice(devices[index]))
    named_layers = {
        index: [(name, layer) for name, layer in partition._modules.items() if layer is not None]
        for index, partition in partitions.items()
    }
    shared = shared_modules([[layer for _, layer in layers] for layers in named_layers.values()])
    stages = {
        index: Stage(
            index,
            layers,
            first_number=sum(balance[:index]),
            device=workers[placement[index]],
            shared=shared,
            skips=skips,
            tuples=tuples,
            loss=loss if index + 1 == len(placement) else None,
            shares_output=index + 1 in partitions and devices[index] == devices[index + 1],
        )
        for index, layers in named_layers.items()
    }
    ways = {(stage, stage) for stage in stages} | {(stage, stage + 1) for stage in stages if stage + 1 in stages}
    ways |= {(a, b) for skip in skips for a, b in skip.hops if a in stages and b in stages}
    pairs = {(placement[a], placement[b]) for a, b in ways} | {(placement[b], placement[a]) for a, b in ways}
    engine = Engine(
        stages=stages,
        placement=placement,
        devices=workers,
        skips=skips,
        backend=backend,
        links={(source, target): link(workers[source], workers[target]) for source, target in sorted(pairs)},
        workers=WorkerThreads(list(workers.values())[: 1 if one_thread else None]),
        lock=threading.Lock(),
        one_thread=one_thread,
    )
    every = (tensor for part in partitions.values() for tensor in (*part.parameters(), *part.buffers()))
    engine.refuse_collectives(next(filter(is_over_processes, every), None))
    return engine
