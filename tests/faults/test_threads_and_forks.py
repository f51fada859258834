"""Several calling threads, and a process that forks between forward and backward."""

import copy
import functools
import os
import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn

from pipework import Pipe
from pipework.model.batchnorm import DeferredBatchNorm
from pipework.model.checkpoint import is_recomputing
from tests.conftest import USUAL
from tests.helpers import in_threads
from tests.programs import RunPython

Result = tuple[torch.Tensor, ...]
CHOSEN = {("outside", "always"), ("1f1b", "always"), ("zb-v", "never")}
BALANCE = [1, 1, 1, 1]
# Of the ways to run a step, three are not slow.
FEW = pytest.mark.parametrize(
    ("way", "checkpoint"),
    [
        pytest.param(way, checkpoint, marks=() if (way, checkpoint) in CHOSEN else pytest.mark.slow)
        for way in USUAL
        for checkpoint in ("never", "always")
    ],
    indirect=["way"],
)


def four_layers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Linear(4, 4))


def loss_and_gradients(way: Any, pipe: Pipe, parameters: Sequence[torch.Tensor], batch: Any) -> Result:
    loss = way.loss(pipe, *batch)
    return loss.detach(), *torch.autograd.grad(loss, parameters)


def at_once(*calls: Callable[[], None]) -> None:
    """Runs each call on a thread of its own, all from the same moment on."""
    start = threading.Barrier(len(calls))
    in_threads(*[lambda c=call: (start.wait(20), c()) for call in calls])


@FEW
def test_two_pipes_that_share_layers_called_at_once(way: Any, checkpoint: str) -> None:
    module, batch = four_layers(), (torch.randn(8, 4), torch.randn(8))
    parameters = list(module.parameters())
    pipes = [way.pipe(module, 4, checkpoint, balance=BALANCE, share=True) for _ in range(2)]
    expected = loss_and_gradients(way, pipes[0], parameters, batch)
    results: list[Result] = []

    def call(pipe: Pipe) -> None:
        for _ in range(50):
            try:
                results.append(loss_and_gradients(way, pipe, parameters, batch))
            except RuntimeError as error:
                if "another pipe" not in str(error):
                    raise

    at_once(lambda: call(pipes[0]), lambda: call(pipes[1]))
    assert all(torch.equal(a, b) for result in results for a, b in zip(result, expected, strict=True))
    assert all(a is b for a, b in zip(module.parameters(), parameters, strict=True))
    for pipe in pipes:
        assert all(map(torch.equal, loss_and_gradients(way, pipe, parameters, batch), expected))


@FEW
def test_two_pipes_and_four_calling_threads(
    way: Any, checkpoint: str, own_workers: Callable[[], list[threading.Thread]]
) -> None:
    """Also their first calls come from two threads at once."""
    pipes = [way.pipe(four_layers(), 4, checkpoint, balance=BALANCE) for _ in range(2)]
    parameters = [list(pipe.parameters()) for pipe in pipes]
    batch = torch.randn(8, 4), torch.randn(8)
    twins = copy.deepcopy(pipes)
    expected = [loss_and_gradients(way, twin, list(twin.parameters()), batch) for twin in twins]
    results: list[tuple[int, Result]] = []

    def call(index: int) -> None:
        for _ in range(10):
            results.append((index, loss_and_gradients(way, pipes[index], parameters[index], batch)))

    at_once(*[functools.partial(call, number % 2) for number in range(4)])
    assert len(results) == 40
    assert len(own_workers()) == sum(len(pipe.devices) for pipe in [*pipes, *twins])
    assert all(torch.equal(a, b) for index, result in results for a, b in zip(result, expected[index], strict=True))
    for pipe, own in zip(pipes, parameters, strict=True):
        assert all(a is b for a, b in zip(pipe.parameters(), own, strict=True))


class Recomputes(nn.Module):
    """Says that it recomputes, and waits until another thread has updated the statistics, or may not."""

    def __init__(self) -> None:
        super().__init__()
        self.begun, self.updated = threading.Event(), threading.Event()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if is_recomputing():
            self.begun.set()
            self.updated.wait(0.5)
        return x


def test_statistics_are_not_updated_while_another_thread_recomputes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The update would reach the copies that stand in for the buffers while a layer runs again."""
    layer, commit = Recomputes(), DeferredBatchNorm.commit
    module = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), layer, nn.Linear(4, 1))
    pipe = Pipe(module, 2, "always", balance=[1, 3], devices=["cpu"] * 2, deferred_batch_norm=True)
    loss = pipe(torch.randn(8, 4)).sum()

    def later(batch_norm: DeferredBatchNorm) -> None:
        layer.begun.wait(0.5)
        commit(batch_norm)
        layer.updated.set()

    def backward() -> None:
        in_call.wait(20)
        loss.backward()

    in_call = threading.Event()
    monkeypatch.setattr(DeferredBatchNorm, "commit", lambda batch_norm: (in_call.set(), later(batch_norm)))
    at_once(lambda: pipe(torch.randn(8, 4)), backward)
    assert layer.begun.is_set()
    assert pipe[1].num_batches_tracked == 2


FORKS = """
import multiprocessing, os, signal, sys, threading
import torch
from torch import nn
from pipework import Pipe

class Forks(nn.Module):
    armed = False

    def forward(self, x):
        if self.armed:
            self.armed = False
            children.append(os.fork())
            if children[-1] == 0:
                in_child("forked in the middle of a mini-batch")
        return x

def in_child(what):
    # A child of a process with threads has only the thread that forked; nothing may wait for the others.
    signal.alarm(20)
    try:
        found = gradients()
    except RuntimeError as error:
        print(what, "-", error, flush=True)
        os._exit(5)
    os._exit(0 if same(found) else 1)

def gradients():
    torch.manual_seed(1)
    return torch.autograd.grad(pipe(x).square().sum(), parameters)

def same(found):
    return all(map(torch.equal, found, expected))

def run_in_child(queue):
    queue.put(same(gradients()))

children = []
torch.set_num_threads(int(sys.argv[2]))
torch.manual_seed(0)
forks = Forks()
module = nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.2), forks, nn.Linear(64, 64))
pipe = Pipe(module, 4, sys.argv[1], balance=[1, 3], devices=["cpu"] * 2)
parameters, x = list(pipe.parameters()), torch.randn(256, 64)
expected = gradients()
threads = threading.active_count()

for _ in range(3):
    child = os.fork()
    if child == 0:
        in_child("forked between mini-batches")
    children.append(child)
    assert same(gradients())

loss = pipe(x).sum()
child = os.fork()
if child == 0:
    signal.alarm(20)
    try:
        loss.backward()
    except RuntimeError as error:
        os._exit(7 if "fork" in str(error) else 1)
    os._exit(1)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
loss.backward()
pipe.zero_grad()

context = multiprocessing.get_context("fork")
queue = context.SimpleQueue()
process = context.Process(target=run_in_child, args=(queue,))
process.start()
assert same(gradients())
assert queue.get()
process.join(20)
assert process.exitcode == 0

codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
assert codes == [0, 0, 0], codes
children.clear()
forks.armed = True
assert same(gradients())
codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
assert codes in ([0], [5]), codes
assert same(gradients())
assert threading.active_count() == threads
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
@pytest.mark.parametrize(("threads", "checkpoint"), [(1, "never"), (2, "always")])
def test_a_forked_child_and_its_parent_go_on_with_a_used_pipe(
    run_python: RunPython, threads: int, checkpoint: str
) -> None:
    """One that is forked while a mini-batch is under way finds parts of it, and is told so if it calls the pipe."""
    result = run_python(["-c", FORKS, checkpoint, threads], timeout=60)
    assert result.returncode == 0, result.stdout + result.stderr
