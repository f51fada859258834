"""Threads that other pipelines left hanging, left behind, or never let run at the same time."""

import copy
import gc
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipework import Pipe
from pipework.model.checkpoint import is_recomputing

CHECKPOINT_MODES = ("never", "except_last", "always")


# 16


class Leaves(nn.Module):
    """Ends the program, on one of its calls."""

    def __init__(self, at: int) -> None:
        super().__init__()
        self.at = at
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.calls == self.at:
            raise SystemExit(3)
        return x


@pytest.mark.parametrize("checkpoint", CHECKPOINT_MODES)
@pytest.mark.parametrize("stage", range(3))
@pytest.mark.parametrize("at", [1, 2, 3])
@pytest.mark.timeout(20)
def test_16_a_layer_that_ends_the_program(
    at: int, stage: int, checkpoint: str, assert_trained_alike: Callable[..., None]
) -> None:
    """`SystemExit` ended the worker's thread and nobody was told: the caller waited for ever.

    It leaves the pipe as it leaves the plain module, and afterwards both train on alike.
    """
    plain = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.1), Leaves(0)) for _ in range(3)))
    pipe = Pipe(copy.deepcopy(plain), 3, checkpoint, balance=[1] * 3, devices=["cpu"] * 3)
    x = torch.randn(6, 4)
    for model, call in ((plain, 1), (pipe, at)):
        model[stage][2].at = call
        with pytest.raises(SystemExit) as caught:
            model(x)
        assert caught.value.code == 3
    assert_trained_alike(plain, pipe, [(torch.randn(6, 4),) for _ in range(2)])


# 17


@pytest.mark.parametrize("ending", ["dropped", "in a cycle", "after an error", "with its loss"])
def test_17_no_thread_stays_behind(ending: str, own_workers: Callable[[], list[threading.Thread]]) -> None:
    """Each pipe left a thread for each of its devices, which waited for ever for its next task."""
    for number in range(1, 4):
        pipe = Pipe(nn.Sequential(*(nn.Linear(2, 2) for _ in range(3))), 2, balance=[1] * 3, devices=["cpu"] * 3)
        assert own_workers() == []
        loss = pipe(torch.randn(4, 2)).sum()
        assert len(own_workers()) == 3, f"pipe {number} has a thread for each partition"
        loss.backward(retain_graph=ending == "with its loss")
        if ending == "after an error":
            with pytest.raises(RuntimeError, match="shapes"):
                pipe(torch.randn(4, 3))
        elif ending == "in a cycle":
            pipe[0].itself = [pipe]
        elif ending == "with its loss":
            del pipe
            assert len(own_workers()) == 3, "the loss can be differentiated once more"
            loss.backward()
        pipe = loss = None
        if ending == "in a cycle":
            gc.collect()
        assert own_workers() == []


# 21


class MeetInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, meet: Callable[[], None] | None) -> Tensor:
        ctx.meet = meet
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        if ctx.meet is not None:
            ctx.meet()
        return gradient, None


class Meet(nn.Module):
    """Waits for the other stage in one kind of action, on the micro-batch whose number its input holds."""

    def __init__(self, action: str, micro_batch: int, meet: Callable[[], None]) -> None:
        super().__init__()
        self.action, self.micro_batch, self.meet = action, micro_batch, meet
        self.gain = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        is_meant = int(x.detach()[0, 0]) == self.micro_batch
        if is_meant and self.action == ("R" if is_recomputing() else "F"):
            self.meet()
        return MeetInBackward.apply(x * self.gain, self.meet if is_meant and self.action == "B" else None)


@pytest.mark.parametrize(
    ("action", "first", "second", "checkpoint"),
    [
        ("F", 1, 0, "never"),  # stage 0 is one micro-batch ahead
        ("F", 1, 0, "always"),
        ("B", 0, 1, "never"),  # stage 1 is one ahead
        ("B", 0, 1, "always"),
        ("R", 0, 0, "always"),  # no stage needs a gradient to recompute its first micro-batch
    ],
)
@pytest.mark.timeout(60)
def test_21_partitions_on_the_cpu_run_at_the_same_time(action: str, first: int, second: int, checkpoint: str) -> None:
    """All partitions on the CPU shared one thread, so that they took turns; and autograd ran the whole backward on the
    thread that called it.
    """
    barrier, met = threading.Barrier(2, timeout=20), set()

    def meet() -> None:
        barrier.wait()  # nobody passes alone
        met.add(threading.current_thread().name)

    module = nn.Sequential(Meet(action, first, meet), Meet(action, second, meet))
    pipe = Pipe(module, 2, checkpoint, balance=[1, 1], devices=["cpu"] * 2)
    pipe(torch.tensor([[0.0], [1.0]])).sum().backward()
    assert met == {"pipework worker 0", "pipework worker 1"}
    assert [parameter.grad.item() for parameter in pipe.parameters()] == [1.0, 1.0]
