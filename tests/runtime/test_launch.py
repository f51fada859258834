"""The loop over actions, executed by a thread for each worker, or by one for all: both compute the same."""

import threading
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from pipework import Pipe
from pipework.autograd.aliases import Aliases
from pipework.model.checkpoint import is_recomputing
from pipework.runtime.device import WorkerDevice
from pipework.runtime.transport import LocalEndpoint


def test_a_thread_enters_its_device_before_parameters_are_gathered_on_it(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    calls = [(WorkerDevice, "enter_thread"), (Aliases, "gather"), (LocalEndpoint, "finish"), (Aliases, "reshard")]
    for owner, name in calls:
        monkeypatch.setattr(owner, name, lambda self, name=name: done.append(name))
    Pipe(nn.Sequential(nn.Linear(2, 2)), balance=[1])(torch.ones(1, 2))
    assert done == [name for _, name in calls]


# A thread for each worker


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
def test_partitions_on_the_cpu_run_at_the_same_time(action: str, first: int, second: int, checkpoint: str) -> None:
    barrier, met = threading.Barrier(2, timeout=20), set()

    def meet() -> None:
        barrier.wait()  # nobody passes alone
        met.add(threading.current_thread().name)

    module = nn.Sequential(Meet(action, first, meet), Meet(action, second, meet))
    pipe = Pipe(module, 2, checkpoint, balance=[1, 1], devices=["cpu"] * 2)
    pipe(torch.tensor([[0.0], [1.0]])).sum().backward()
    assert met == {"pipework worker 0", "pipework worker 1"}
    assert [parameter.grad.item() for parameter in pipe.parameters()] == [1.0, 1.0]


# One thread


def model(layers: int = 4) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Dropout(0.3)) for _ in range(layers)))


class Threads(nn.Module):
    """Notes on which threads it runs, forward and backward."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[str] = set()
        self.intra_op: set[int] = set()

    def forward(self, x: Tensor) -> Tensor:
        self.seen.add(threading.current_thread().name)
        self.intra_op.add(torch.get_num_threads())
        x.register_hook(lambda _: self.seen.add(threading.current_thread().name))
        return x * 1


@pytest.mark.parametrize(
    ("schedule", "checkpoint"), [("gpipe", "except_last"), ("interleaved-1f1b", "never"), ("zb-v", "except_last")]
)
def test_one_thread_and_a_mode_compute_what_a_thread_for_each_does(schedule: str, checkpoint: str) -> None:
    x, y = torch.randn(8, 6), torch.randn(8, 6)
    counter, found = FlopCounterMode(display=False), []
    for debug, mode in ((), nullcontext()), ("one_thread", nullcontext()), ((), counter):
        options = {"schedule": schedule, "loss_fn": nn.functional.mse_loss, "devices": ["cpu"] * 2, "debug": debug}
        pipe = Pipe(model(), 4, checkpoint, **options)
        torch.manual_seed(7)
        with mode, pipe.record() as recording:
            loss = pipe(x, target=y)
            loss.backward()
        found.append([loss.detach(), *(parameter.grad for parameter in pipe.parameters())])
        recorded = {(each.worker, each.action.kind) for each in recording.timeline().intervals}
        assert recorded >= {(worker, "F") for worker in (0, 1)}
    assert all(all(map(torch.equal, found[0], others)) for others in found[1:])
    assert counter.get_total_flops() > 0  # a mode sees every operator


def test_all_layers_run_on_one_thread_with_all_cores_and_an_error_names_its_place() -> None:
    class Fails(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            if x.sum() > 100:
                raise ValueError("too large")
            return x

    layers = [Threads() for _ in range(3)]
    module = nn.Sequential(nn.Linear(2, 2), *layers, Fails())
    pipe = Pipe(module, 2, balance=[2, 1, 2], devices=["cpu"] * 3, debug="one_thread")
    with pytest.raises(ValueError, match="too large") as caught:
        pipe(torch.full((4, 2), 1e4) * pipe[0].weight.sign().sum(0))
    assert any("stage 2, micro-batch 0, action F" in note for note in caught.value.__notes__)
    pipe(torch.ones(4, 2)).sum().backward()
    assert set.union(*(layer.seen for layer in layers)) == {"pipework worker 0"}
    assert set.union(*(layer.intra_op for layer in layers)) == {torch.get_num_threads()}
