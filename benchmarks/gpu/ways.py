"""The ways to train that are compared: the plain model, a step as one CUDA graph, pipes, and other libraries."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks import harness
from benchmarks.gpu import parts
from benchmarks.gpu.card import Card
from pipework import Pipe
from pipework.schedule import Costs, simulate

Step = Callable[[Any, Any], object]
"""Forward and backward of a mini-batch: its inputs and its target."""


GRAPHS = "graphs"
AT_ONCE = "stages at once"


@dataclass
class Way:
    """A way to train.

    Attributes:
        model: whose parameters get the gradients.
        step: of a mini-batch.
        sms: on which it computes.
        ours: whether it is pipework's.
        pipe: of pipework; None: it is none.
        graph: whether the step is a CUDA graph, which has its inputs, and its gradients' memory, in it.
        stream: that the caller uses; None: the default one.
        reads: the memory of a mini-batch, which a graph goes on to read.
        grown: the bytes that a step takes beside parameters, as far as is known yet.
        is_compared: whether it has the gradients of the plain model.
    """

    model: nn.Module
    step: Step
    sms: int
    ours: bool = False
    pipe: Pipe | None = None
    graph: bool = False
    stream: Any = None
    reads: Any = None
    grown: int = 0
    is_compared: bool = True

    @property
    def captures(self) -> bool:
        """Whether it is a pipe that captures its actions: the first mini-batches of each form run without."""
        return self.pipe is not None and not self.graph and self.pipe.graphs is not None

    @property
    def actions(self) -> int:
        """How many actions of a pipe the host launches in a step; 0: it is none."""
        return 0 if self.pipe is None or self.graph else sum(map(len, self.pipe.schedule().orders))

    @property
    def warm_up(self) -> int:
        """Steps before those that are measured: the first mini-batches of a pipe compare and inspect."""
        return 8 if self.pipe is not None and not self.graph else 2

    def clear(self) -> None:
        """Before each step."""
        if not self.graph:
            self.model.zero_grad(set_to_none=True)

    def run(self, x: Any, y: Any) -> None:
        """One step, in the caller's stream."""
        with contextlib.nullcontext() if self.stream is None else torch.cuda.stream(self.stream):
            self.step(x, y)

    def gradients(self, x: Any, y: Any) -> list[Tensor]:
        """Of a step; of a pipe that captures, of one that is replayed."""
        for _ in range(self.warm_up - 1 if self.captures else 0):
            self.clear()
            self.run(x, y)
        self.clear()
        self.run(x, y)
        if self.stream is not None:
            self.stream.synchronize()
        return harness.gradients_of(self.model)

    def ideal(self) -> float | None:
        """The step's share of the plain one, if all stages take equally long and nothing else does."""
        if self.pipe is None:
            return None
        schedule = self.pipe.schedule()
        makespan = simulate(schedule, Costs(forward=1.0, backward=2.0)).makespan
        return makespan / (3.0 * schedule.stages * self.pipe.chunks)


def plain(model: nn.Module, loss_of: Callable[..., Tensor], chunks: int, sms: int, stream: Any = None) -> Way:
    """The model by itself, one micro-batch after the other."""

    def step(x: Tensor, y: Tensor) -> None:
        for piece, target in zip(x.chunk(chunks), y.chunk(chunks), strict=True):
            (loss_of(model(piece), target) / chunks).backward()

    return Way(model, step, sms, stream=stream)


def pipe_way(pipe: Pipe, sms: int, on: Sequence[parts.Part] = ()) -> Way:
    """A pipe, each of whose workers has a part of the card if there are some."""
    if on:
        parts.compute_on(pipe, on)
    return Way(pipe, lambda x, y: pipe(x, target=y).backward(), sms, ours=True, pipe=pipe)


def as_graph(way: Way, card: Card, batch: tuple[Any, Any], stream: Any) -> Way:
    """The whole step of another way as one CUDA graph.

    Args:
        way: the other one, which is not used any more.
        card: on which.
        batch: always the same memory.
        stream: in which it is captured and replayed.
    """
    way.stream = stream
    for _ in range(way.warm_up):
        way.clear()
        way.run(*batch)
    card.synchronize()
    way.clear()
    before = card.used()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="relaxed"):
        way.step(*batch)
    grown = card.most_used() - before
    return Way(
        way.model, lambda x, y: graph.replay(), way.sms, way.ours, way.pipe, graph=True, stream=stream, reads=batch,
        grown=grown,
    )  # fmt: skip


def at_once(
    models: Sequence[nn.Sequential],
    loss_of: Callable[..., Tensor],
    task: tuple[Any, int],
    card: Card,
    on: Sequence[parts.Part],
) -> Way:
    """The stages of a model at the same time, none of which waits for another: each a graph on a part of the card.

    What it takes beside a share of the plain graph is the contention of the parts for memory and power.

    Args:
        models: the layers of the stages.
        loss_of: for each stage.
        task: the mini-batch, and the number of micro-batches.
        card: on which.
        on: the parts; none: one after the other, and no graphs.
    """
    batch, chunks = task

    def step_of(model: nn.Module, *, is_first: bool) -> Step:
        def step(x: Tensor, y: Tensor) -> None:
            for piece, target in zip(x.chunk(chunks), y.chunk(chunks), strict=True):
                given = piece if is_first else piece.detach().requires_grad_()
                (loss_of(model(given), target) / chunks).backward()

        return step

    each = [Way(model, step_of(model, is_first=not number), 1) for number, model in enumerate(models)]
    graphs = [as_graph(way, card, batch, part.stream) for way, part in zip(each, on, strict=False)]

    def step(x: Any, y: Any) -> None:
        if not graphs:
            for way in each:
                way.step(x, y)
            return
        caller = torch.cuda.current_stream(card.device)
        for graph in graphs:
            graph.stream.wait_stream(caller)
            graph.run(x, y)
        for graph in graphs:
            caller.wait_stream(graph.stream)

    sms = sum(part.sms for part in on) or card.sms
    return Way(nn.ModuleList(models), step, sms, graph=bool(graphs), reads=batch, is_compared=False)


def of_pytorch(model: nn.Module, loss_of: Callable[..., Tensor], chunks: int, card: Card) -> Way:
    """A pipe of torch.distributed.pipelining with a single stage, in a group of this process alone."""
    from torch import distributed
    from torch.distributed import pipelining

    if not distributed.is_initialized():
        distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    schedules = dict[torch.Size, Any]()

    def step(x: Tensor, y: Tensor) -> None:
        if x.shape not in schedules:  # a stage refuses other shapes than those of its first mini-batch
            schedules[x.shape] = pipelining.Schedule1F1B(
                pipelining.PipelineStage(model, 0, 1, card.device), chunks,
                loss_fn=lambda output, target: loss_of(output, target) / chunks, scale_grads=False,
            )  # fmt: skip
        schedules[x.shape].step(x, target=y, return_outputs=False)

    return Way(model, step, card.sms)


def of_torchgpipe(model: nn.Sequential, loss_of: Callable[..., Tensor], chunks: int, card: Card) -> Way | None:
    """A pipe of torchgpipe with a single partition; None where it is not installed."""
    library = harness.old_library("torchgpipe", "0.0.7")
    if library is None:
        return None
    pipe = library.GPipe(model, [len(model)], devices=[card.device], chunks=chunks, checkpoint="never")
    return Way(pipe, lambda x, y: loss_of(pipe(x), y).backward(), card.sms)
