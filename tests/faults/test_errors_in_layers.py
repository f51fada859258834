"""Row 2 of the fault matrix: an exception in a layer's forward or backward, at every stage and micro-batch."""

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import nn

from pipework import Pipe
from pipework.model.checkpoint import is_recomputing
from pipework.schedule import Action
from tests.conftest import USUAL
from tests.tiers import sampled

STAGES = 4
CHUNKS = 3
INSIDE = ("gpipe", "1f1b", "interleaved-1f1b", "looped-bfs")


class Mishap(Exception):
    """Raised by a layer on purpose."""


class RunSpec(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, layer: "Fragile", micro_batch: int) -> torch.Tensor:
        ctx.layer, ctx.micro_batch = layer, micro_batch
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        ctx.layer.maybe_fail("backward", ctx.micro_batch)
        return gradient, None, None


class Fragile(nn.Module):
    """Fails in one direction on one micro-batch; which one it works on stands in the input's last column."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)
        self.fail: tuple[str, int] | None = None
        self.error: BaseException = Mishap("on purpose")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        micro_batch = int(x[0, -1])
        self.maybe_fail("forward", micro_batch)
        y = RunSpec.apply(self.linear(x), self, micro_batch)
        return torch.cat([y, x[:, -1:]], dim=1)

    def maybe_fail(self, direction: str, micro_batch: int) -> None:
        if self.fail == (direction, micro_batch):
            raise self.error


def fragile_pipe(way: Any, checkpoint: str = "never", **options: Any) -> Pipe:
    return way.pipe(nn.Sequential(*(Fragile() for _ in range(STAGES))), CHUNKS, checkpoint, balance=[1] * 4, **options)


def numbered_batch() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.cat([torch.randn(CHUNKS, 3), torch.arange(CHUNKS)[:, None].float()], dim=1), torch.arange(3.0)


@pytest.mark.parametrize(
    ("way", "direction", "checkpoint", "stage", "micro_batch"),
    sampled(USUAL, ["forward", "backward"], ["never", "always"], range(STAGES), range(CHUNKS), each=3),
    indirect=["way"],
)
@pytest.mark.timeout(20)
def test_the_original_exception_is_raised_with_a_note(
    way: Any, checkpoint: str, direction: str, stage: int, micro_batch: int
) -> None:
    pipe = fragile_pipe(way, checkpoint)
    pipe[stage].fail = (direction, micro_batch)
    with pytest.raises(Mishap) as caught:
        way.loss(pipe, *numbered_batch()).backward()
    assert caught.value is pipe[stage].error
    in_layer = [f"pipework: in layer '{stage}' (Fragile)"] if direction == "forward" else []
    assert caught.value.__notes__ == [
        *in_layer,
        f"pipework: stage {stage}, micro-batch {micro_batch}, action {way.named(direction[0].upper())}",
    ]
    names = [entry.name for entry in caught.traceback]
    assert "maybe_fail" in names, "the traceback leads to the layer's own line"


class FailsWhenRecomputed(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if is_recomputing():
            raise Mishap
        return super().forward(x)


@pytest.mark.timeout(20)
def test_an_exception_during_recomputation_is_named_as_such(way: Any) -> None:
    pipe = way.pipe(nn.Sequential(FailsWhenRecomputed(2, 2), nn.Linear(2, 2)), 3, "always", balance=[1, 1])
    with pytest.raises(Mishap) as caught:
        way.loss(pipe, torch.ones(3, 2), torch.ones(3)).backward()
    assert caught.value.__notes__ == [
        "pipework: in layer '0' (FailsWhenRecomputed)",
        "pipework: stage 0, micro-batch 0, action R",
    ]


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("way", ["outside", "1f1b", "zb-v"], indirect=True)
@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt(), StopIteration("odd"), GeneratorExit()], ids=repr)
@pytest.mark.timeout(20)
def test_even_exceptions_that_end_a_thread_reach_the_caller(way: Any, direction: str, error: BaseException) -> None:
    pipe = fragile_pipe(way)
    pipe[1].error, pipe[1].fail = error, (direction, 1)
    with pytest.raises(type(error)) as caught:
        way.loss(pipe, *numbered_batch()).backward()
    assert caught.value is error


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_the_pipe_stays_usable_and_exact(way: Any, checkpoint: str, direction: str) -> None:
    pipe, batch = fragile_pipe(way, checkpoint), numbered_batch()
    way.loss(pipe, *batch).backward()
    expected = [parameter.grad for parameter in pipe.parameters()]
    pipe.zero_grad()
    parameters = list(pipe.parameters())
    pipe[1].fail = (direction, 1)
    for _ in range(3):
        with pytest.raises(Mishap):
            way.loss(pipe, *batch).backward()
    assert all(a is b for a, b in zip(pipe.parameters(), parameters, strict=True))
    assert all(parameter.grad is None for parameter in pipe.parameters()), "a failed backward delivers nothing"
    pipe[1].fail = None
    way.loss(pipe, *batch).backward()
    assert all(map(torch.equal, expected, [parameter.grad for parameter in pipe.parameters()]))


@pytest.mark.parametrize("way", ["outside"], indirect=True)
def test_a_backward_that_failed_cannot_be_repeated(way: Any) -> None:
    pipe = fragile_pipe(way)
    pipe[1].fail = ("backward", 1)
    loss = pipe(numbered_batch()[0]).sum()
    for error, words in ((Mishap, ""), (RuntimeError, "failed before")):
        with pytest.raises(error, match=words or None):
            loss.backward()


# The loss function is no layer, and no less fragile


class FragileLoss(nn.Module):
    """Fails on one micro-batch, in its first or its second pass, or in its backward."""

    def __init__(self) -> None:
        super().__init__()
        self.fail: tuple[str, int] | None = None
        self.seen: list[int] = []

    def forward(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        micro_batch = int(target[0])
        action = "R" if micro_batch in self.seen else "F"
        self.seen.append(micro_batch)
        self.maybe_fail(action, micro_batch)
        loss = output.mean()
        loss.register_hook(lambda gradient: self.maybe_fail("B", micro_batch))
        return loss

    def maybe_fail(self, action: str, micro_batch: int) -> None:
        if self.fail == (action, micro_batch):
            raise Mishap(action)


@pytest.mark.parametrize("way", INSIDE, indirect=True)
@pytest.mark.parametrize("micro_batch", range(CHUNKS))
@pytest.mark.parametrize("action", ["F", "R", "B"])
@pytest.mark.timeout(20)
def test_an_exception_in_the_loss_function(way: Any, action: str, micro_batch: int) -> None:
    criterion = FragileLoss()
    pipe = fragile_pipe(way, "always", loss_fn=criterion)
    if all(Action(action, STAGES - 1, micro_batch) not in order for order in pipe.schedule().orders):
        pytest.skip("the last stage differentiates at once, so it recomputes nothing")
    x, y = numbered_batch()
    for fail in ((action, micro_batch), None, (action, micro_batch), None):
        criterion.fail = fail
        criterion.seen.clear()
        if fail is None:
            pipe(x, target=y).backward()
            continue
        with pytest.raises(Mishap) as caught:
            pipe(x, target=y)
        assert caught.value.__notes__ == [
            *(["pipework: in loss_fn (FragileLoss)"] if action != "B" else []),
            f"pipework: stage {STAGES - 1}, micro-batch {micro_batch}, action {way.named(action)}",
        ]


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_a_failed_step_keeps_no_tensor_alive(way: Any, direction: str) -> None:
    pipe = fragile_pipe(way)
    x, y = numbered_batch()
    way.loss(pipe, x, y).backward()
    pipe[2].fail = (direction, 1)
    gone = [weakref.ref(thing) for tensor in (x, y) for thing in (tensor, tensor.untyped_storage())]
    gc.collect()
    gc.disable()
    try:
        with pytest.raises(Mishap) as caught:
            way.loss(pipe, x, y).backward()
        # Only the exception's own traceback still leads to what the layer was working on.
        caught.value.__traceback__ = None
        del caught, x, y
        pipe[2].error = Mishap()
        assert [reference() for reference in gone] == [None] * 4
    finally:
        gc.enable()
