"""A pipeline of threads that does only what every one must: no errors, options, randomness, checkpoints or recording.

A thread for each worker runs its actions in the order of the schedule. A forward calls the layer, a backward calls
autograd, and a queue for each stage carries outputs one way and gradients the other. What such a step needs above its
simulation is what Python's threads cost on this machine, and what no runtime of Python's threads can do without.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from queue import SimpleQueue

import torch
from torch import Tensor, nn

from pipework.schedule import Action, Schedule


class Stage:
    """A layer, what waits for its backward, and the queues to it."""

    def __init__(self, layer: nn.Module) -> None:
        self.layer = layer
        self.graphs: dict[int, tuple[Tensor, Tensor]] = {}
        self.inputs: SimpleQueue[Tensor] = SimpleQueue()
        self.gradients: SimpleQueue[Tensor | None] = SimpleQueue()


def step_of(schedule: Schedule, layers: Sequence[nn.Module], micro_batches: Sequence[Tensor]) -> Callable[[], None]:
    """A training step whose loss is the sum of the outputs; each stage's micro-batches come in their order.

    Args:
        schedule: of actions F and B.
        layers: one for each stage.
        micro_batches: the inputs, which require gradients.
    """
    stages = [Stage(layer) for layer in layers]

    def forward(number: int, micro_batch: int) -> None:
        stage = stages[number]
        x = stage.inputs.get()
        y = stage.layer(x)
        stage.graphs[micro_batch] = x, y
        if number + 1 < len(stages):
            stages[number + 1].inputs.put(y.detach().requires_grad_())
        else:
            stage.graphs[micro_batch] = x, y.sum()
            stage.gradients.put(None)

    def backward(number: int, micro_batch: int) -> None:
        stage = stages[number]
        gradient = stage.gradients.get()
        x, y = stage.graphs.pop(micro_batch)
        torch.autograd.backward((y,), (gradient,))
        if number:
            assert x.grad is not None
            stages[number - 1].gradients.put(x.grad)
        x.grad = None

    def work(order: Sequence[Action]) -> None:
        with torch.autograd.set_multithreading_enabled(False):
            for action in order:
                (forward if action.kind == "F" else backward)(action.stage, action.micro_batch)

    def step() -> None:
        for x in micro_batches:
            stages[0].inputs.put(x)
        threads = [threading.Thread(target=work, args=(order,)) for order in schedule.orders]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    return step
