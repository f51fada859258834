"""Skip connections across any stages: as in the un-pipelined model, bit by bit."""

import gc
import weakref

import pytest
import torch
from torch import nn

from pipework import Pipe, pop, skippable, stash

WIDTH = 6


@skippable(stash=["skip"])
class Down(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        y = torch.tanh(self.linear(x))
        yield stash("skip", y)
        return y


@skippable(pop=["skip"])
class Up(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        skip = yield pop("skip")
        return torch.tanh(self.linear(torch.cat([x, skip], dim=1)))


@pytest.mark.one_process("a failure between processes ends the pipe: tests/distributed/together")
@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize(
    ("between", "balance"),
    [([], [1, 1, 1]), ([nn.Identity(), nn.Flatten()], [1, 1, 1, 1, 1]), ([], [1, 2]), ([nn.Identity()], [1, 1, 2])],
    ids=str,
)
def test_overwriting_a_stashed_tensor_is_an_error(
    checkpoint: str, grad: bool, between: list[nn.Module], balance: list[int]
) -> None:
    """On its way, and in the stage that pops it."""
    module = nn.Sequential(Down(), *between, nn.ReLU(inplace=True), Up())
    pipe = Pipe(module, 2, checkpoint, balance=balance, devices=["cpu"] * len(balance))
    with (
        torch.set_grad_enabled(grad),
        pytest.raises(RuntimeError, match="changed skip tensor 'skip' in place") as caught,
    ):
        pipe(torch.randn(4, WIDTH))
    stage = len(between) + 1
    assert f"stage {stage} has changed" in str(caught.value)
    assert f"pipework: stage {stage}, micro-batch" in caught.value.__notes__[0]


@skippable(pop=["skip"])
class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        skip = yield pop("skip")
        return torch.tanh(self.linear(x)) + skip


@skippable(stash=["skip"])
class DownAside(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        yield stash("skip", self.linear(x))
        return x


@skippable(pop=["skip"])
class Doubles(nn.Module):
    def forward(self, x):
        skip = yield pop("skip")
        return x + skip.mul_(2)


@pytest.mark.one_process("a failure between processes ends the pipe: tests/distributed/together")
@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ([Doubles(), nn.Identity(), Residual()], "stage 1 has changed .* still to be popped; stash a clone"),
        ([Residual(), nn.Identity(), Doubles()], "stage 3 has changed .* another stage has popped it, too; clone it"),
    ],
    ids=["first", "last"],
)
def test_one_of_several_layers_that_pop_must_not_overwrite_the_tensor(
    checkpoint: str, layers: list[nn.Module], message: str
) -> None:
    pipe = Pipe(nn.Sequential(DownAside(), *layers), 2, checkpoint, balance=[1] * 4, devices=["cpu"] * 4)
    with pytest.raises(RuntimeError, match=message):
        pipe(torch.randn(4, WIDTH)).sum().backward()


@pytest.mark.one_process("values are seen by all, in one process")
def test_what_no_later_stage_pops_may_be_overwritten() -> None:
    x = torch.randn(4, WIDTH)
    module = nn.Sequential(Down(), nn.ReLU(), nn.ReLU(inplace=True), Up(), nn.ReLU(inplace=True))
    expected = module(x)
    pipe = Pipe(module, 2, "never", balance=[1, 1, 1, 1, 1], devices=["cpu"] * 5)
    assert torch.equal(pipe(x), expected)

    @skippable(stash=["half"])
    class Split(nn.Module):
        def forward(self, x):
            rows = x.detach().clone()
            yield stash("half", rows[:, : WIDTH // 2])
            return rows[:, WIDTH // 2 :]

    @skippable(pop=["half"])
    class Join(nn.Module):
        def forward(self, x):
            half = yield pop("half")
            return half + x

    module = nn.Sequential(Split(), nn.ReLU(inplace=True), Join())
    expected = module(x)
    pipe = Pipe(module, balance=[1, 1, 1], devices=["cpu"] * 3)
    assert torch.equal(pipe(x), expected)


@pytest.mark.one_process("watches what all layers do, in one process")
def test_a_skip_is_freed_at_its_last_use() -> None:
    alive: list[weakref.ref[torch.Tensor]] = []
    seen: list[bool] = []

    @skippable(stash=["long"])
    class Fork(nn.Module):
        def forward(self, x):
            skip = x * 1
            alive.append(weakref.ref(skip.untyped_storage()))
            yield stash("long", skip)
            return x + 1

    @skippable(pop=["long"])
    class Use(nn.Module):
        def forward(self, x):
            skip = yield pop("long")
            return x + skip

    class Look(nn.Module):
        def forward(self, x):
            gc.collect()
            seen.append(alive[-1]() is None)
            return x

    module = nn.Sequential(Fork(), Use(), Look())
    with torch.no_grad():
        Pipe(module, 1, balance=[1, 1, 1], devices=["cpu"] * 3)(torch.ones(1, 1))
    assert seen == [True]
