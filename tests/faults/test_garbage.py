"""Row 24 of the fault matrix: a pipe that is dropped or collected, at any moment and by any thread, never blocks."""

import gc
import threading
import time
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from pipework import Pipe

Threads = Callable[[], list[threading.Thread]]
pytestmark = pytest.mark.timeout(60)


class Does(nn.Module):
    """Does something once, while a worker runs it."""

    def __init__(self) -> None:
        super().__init__()
        self.todo: list[Callable[[], object]] = []

    def forward(self, x: Tensor) -> Tensor:
        if self.todo:
            self.todo.pop()()
        return x


def used_pipe(*between: nn.Module, checkpoint: str = "except_last") -> Pipe:
    layers = [nn.Linear(4, 4), *between, nn.Linear(4, 4)]
    pipe = Pipe(nn.Sequential(*layers), 2, checkpoint, balance=[1, len(layers) - 1], devices=["cpu"] * 2)
    pipe(torch.ones(4, 4)).sum().backward()
    pipe.zero_grad()
    return pipe


def all_end(threads: Threads) -> bool:
    deadline = time.monotonic() + 10
    while threads() and time.monotonic() < deadline:
        time.sleep(0.01)
    return not threads()


def test_a_loss_outlives_its_pipe(checkpoint: str, own_workers: Threads) -> None:
    pipe = used_pipe(checkpoint=checkpoint)
    parameters, x = list(pipe.parameters()), torch.randn(4, 4)
    expected = torch.autograd.grad(pipe(x).square().sum(), parameters)
    loss = pipe(x).square().sum()
    del pipe
    gc.collect()
    assert all(map(torch.equal, torch.autograd.grad(loss, parameters), expected))
    del loss
    assert own_workers() == []


def test_another_pipes_worker_collects_it(own_workers: Threads) -> None:
    """With its threads idle, and the collecting thread none of them."""
    does = Does()
    collector = used_pipe(does)
    mine = set(own_workers())
    pipe = used_pipe()
    pipe[0].pipe = [pipe]
    del pipe
    does.todo.append(gc.collect)
    collector(torch.randn(4, 4)).sum().backward()
    assert set(own_workers()) == mine


def test_its_own_worker_drops_the_last_name_of_it(own_workers: Threads) -> None:
    does = Does()
    names = {"pipe": used_pipe(does)}
    does.todo += [gc.collect, names.clear]
    names["pipe"](torch.randn(4, 4)).sum().backward()
    assert not names
    does.todo.clear()
    assert all_end(own_workers)
