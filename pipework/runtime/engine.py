"""The engine of a pipe: the stages, devices, links and threads of this process, which all steps share."""

from __future__ import annotations

import contextlib
import threading
from typing import TYPE_CHECKING

import torch

from pipework.runtime.device import WorkerDevice, link
from pipework.runtime.free_memory import HostAccount
from pipework.runtime.graphs.captured_steps import CapturedSteps
from pipework.runtime.stage.execution_views import shared_modules
from pipework.runtime.stage.stage import Stage
from pipework.runtime.worker_threads import WorkerThreads
from pipework.values.dtensor import is_over_processes, placement_text

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from torch import Tensor, nn

    from pipework.assignment.assignment import Assignment
    from pipework.autograd.fully_sharded import FullySharded
    from pipework.backend import Backend
    from pipework.model.sequential import TupleRule
    from pipework.runtime.device import Link
    from pipework.runtime.program import Program
    from pipework.runtime.skips.skip import Skip


class Engine:
    """Stages, and the workers that live with them. Holds threads, so it is neither copied nor pickled.

    Args:
        partitions: the layers of this process, by the number of their stage.
        assignment: the worker and the device of each stage, wherever it is.
        skips: the skip connections between all layers.
        backend: of the pipe.
        tuples: how a tuple reaches a layer.
        loss: computed by the last stage, if it is a module; its buffers are treated like those of the layers.
        one_thread: whether one thread is to execute the actions of all workers of this process.
        graphs: how steps are captured, see `Settings.graphs`; empty: they are not.

    Attributes:
        captured_steps: of the pipe; None: nothing is captured.
        stages: those whose workers are in this process, by number and in order.
        placement: the worker of each stage, wherever it is.
        devices: of the workers in this process, by number and in order.
        accelerators: those of them that are not the CPU.
        links: see `LocalTransport`.
        workers: the threads.
        lock: held while the workers run, because a stage's slots can hold the leaves of one mini-batch only, and while
            a link is made.
    """

    def __init__(
        self,
        partitions: Mapping[int, nn.Sequential],
        assignment: Assignment,
        skips: Sequence[Skip],
        backend: Backend,
        *,
        tuples: TupleRule,
        loss: nn.Module | None = None,
        one_thread: bool = False,
        graphs: frozenset[str] = frozenset(),
    ) -> None:
        self.placement = placement = assignment.placement
        self.skips = skips
        self.backend = backend
        self.one_thread = one_thread
        self.lock = threading.Lock()
        here = sorted({placement[index] for index in partitions})
        self.account = HostAccount()
        self.devices = {worker: WorkerDevice(assignment.devices[worker], self.account) for worker in here}
        self.accelerators = [device for device in self.devices.values() if device.stream is not None]
        layers = {
            index: [(name, layer) for name, layer in partition._modules.items() if layer is not None]
            for index, partition in partitions.items()
        }
        named = [pair for each in layers.values() for pair in each]
        if loss is not None:
            named.append(("loss_fn", loss))
        self.captured_steps = CapturedSteps(graphs, self.devices, named) if graphs else None
        shared = shared_modules([[layer for _, layer in each] for each in layers.values()])
        balance = assignment.partitioning.balance
        self.stages = {
            index: Stage(
                index,
                layers[index],
                first_number=sum(balance[:index]),
                device=self.devices[placement[index]],
                shared=shared,
                skips=skips,
                tuples=tuples,
                loss=loss if index + 1 == len(placement) else None,
            )
            for index in partitions
        }
        self.links: dict[tuple[int, int], Link | None] = {}
        self._make_links()
        self.workers = WorkerThreads(list(self.devices.values())[: 1 if one_thread else None])
        every = (tensor for part in partitions.values() for tensor in (*part.parameters(), *part.buffers()))
        self.refuse_collectives(next(filter(is_over_processes, every), None))

    def _make_links(self) -> None:
        """Those from the caller to each worker, and those for values, gradients and skips, either way."""
        ways = [(stage, stage + distance) for stage in self.stages for distance in (0, 1)]
        ways += [hop for skip in self.skips for hop in skip.hops]
        within = [(a, b) for a, b in ways if a in self.stages and b in self.stages]
        pairs = {(self.placement[a], self.placement[b]) for hop in within for a, b in (hop, hop[::-1])}
        for source, target in sorted(pairs):
            self.links[source, target] = link(self.devices[source], self.devices[target])

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

    @contextlib.contextmanager
    def claiming_host_memory(self, program: Program) -> Iterator[None]:
        """Around a mini-batch: if the host has too little memory, it leaves buffers and random numbers as they were.

        How much a worker needs is known when its first micro-batch goes to the host, and layers have run before.
        """
        workers = [each for number, each in self.devices.items() if program.away_at_once[number]]
        if all(each.host_memory.asked for each in workers):
            yield
            return
        with self.lock:
            before = [(stage.buffers, stage.buffers.snapshot()) for stage in self.stages.values()]
        state, self.account.share = torch.get_rng_state(), program.host_share(self.devices)
        try:
            yield
        except MemoryError:
            torch.set_rng_state(state)
            for buffers, snapshot in before:
                buffers.restore(snapshot)
            for each in workers:  # one O may have moved nothing, and the next one have found too little
                each.host_memory.asked = False
            raise

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
