"""Skip connections across any stages: as in the un-pipelined model, bit by bit."""

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from pipework import Pipe, pop, skippable, stash
from pipework.skip import Namespace, verify_skippables
from tests.ranks import held

WIDTH = 6
CHECKPOINT_MODES = ("never", "except_last", "always")


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


@skippable(stash=["maybe"])
class StashNothing(nn.Module):
    def forward(self, x):
        yield stash("maybe", None)
        return x


@skippable(pop=["maybe"])
class PopNothing(nn.Module):
    def forward(self, x):
        assert (yield pop("maybe")) is None
        return x


def u_net(depth: int = 3) -> nn.Sequential:
    spaces = [Namespace() for _ in range(depth)]
    return nn.Sequential(
        *(Down().isolate(space) for space in spaces),
        nn.Dropout(0.2),
        *(Up().isolate(space) for space in reversed(spaces)),
        nn.Linear(WIDTH, 3),
    )


BALANCES = [[8], [4, 4], [1, 6, 1], [1, 3, 2, 2], [1] * 8]


@pytest.mark.parametrize("rows", [8, 7, 2])
@pytest.mark.parametrize("balance", BALANCES, ids=str)
@pytest.mark.parametrize("checkpoint", CHECKPOINT_MODES)
def test_u_net_is_bitwise_equal_after_three_steps(
    way: Any, checkpoint: str, balance: list[int], rows: int, assert_trained_alike: Callable[..., None]
) -> None:
    plain = u_net()
    verify_skippables(plain)
    pipe = way.pipe(plain, 4, checkpoint, balance=balance)
    assert_trained_alike(plain, pipe, [(torch.randn(rows, WIDTH),) for _ in range(3)], way=way)


@pytest.mark.parametrize("checkpoint", CHECKPOINT_MODES)
@pytest.mark.parametrize("balance", [[5], [1, 1, 1, 1, 1], [1, 1, 1, 2], [2, 3], [1, 4]], ids=str)
def test_one_stash_popped_by_several_layers(way: Any, checkpoint: str, balance: list[int]) -> None:
    plain = nn.Sequential(Down(), nn.Tanh(), Up(), Up(), nn.Linear(WIDTH, 2)).double()
    verify_skippables(plain)
    pipe = way.pipe(plain, 3, checkpoint, balance=balance)
    x, y = torch.randn(6, WIDTH, dtype=torch.float64), torch.randn(6, dtype=torch.float64)
    way.reference(plain, x, y, 1, key=0)
    way.loss(pipe, x, y).backward()
    for expected, actual in zip(held(plain, pipe).parameters(), pipe.parameters(), strict=True):
        torch.testing.assert_close(actual.grad, expected.grad, rtol=1e-12, atol=1e-15)


def test_none_can_be_stashed(way: Any) -> None:
    module = nn.Sequential(StashNothing(), nn.Linear(WIDTH, WIDTH), nn.Tanh(), PopNothing())
    pipe = way.pipe(module, 2, balance=[1] * 4)
    way.loss(pipe, torch.randn(4, WIDTH), torch.randn(4)).backward()
    assert all(parameter.grad is not None for parameter in pipe.parameters())


def test_retained_graphs_and_evaluation(way: Any) -> None:
    pipe = way.pipe(u_net(), 2, "always", balance=[1] * 8)
    x = torch.randn(4, WIDTH)
    loss = way.loss(pipe, x, torch.randn(4))
    loss.backward(retain_graph=True)
    once = [parameter.grad.clone() for parameter in pipe.parameters()]
    with torch.no_grad():
        assert pipe(x).shape == (4, 3)
    loss.backward()
    for parameter, gradient in zip(pipe.parameters(), once, strict=True):
        assert torch.equal(parameter.grad, gradient * 2)


@pytest.mark.one_process("nothing is computed")
def test_unmatched_skips_are_refused_when_the_module_is_wrapped() -> None:
    with pytest.raises(TypeError, match="no module declared 'skip' as poppable but stashed"):
        Pipe(nn.Sequential(Down(), nn.Tanh()))


@pytest.mark.one_process("a failure between processes ends the pipe: tests/distributed/together")
@pytest.mark.parametrize("checkpoint", CHECKPOINT_MODES)
@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("between", [[], [nn.Identity()], [nn.Identity(), nn.Flatten()]], ids=len)
def test_overwriting_a_stashed_tensor_on_its_way_is_an_error(
    checkpoint: str, grad: bool, between: list[nn.Module]
) -> None:
    module = nn.Sequential(Down(), *between, nn.ReLU(inplace=True), Up())
    pipe = Pipe(module, 2, checkpoint, balance=[1] * len(module), devices=["cpu"] * len(module))
    with (
        torch.set_grad_enabled(grad),
        pytest.raises(RuntimeError, match="changed skip tensor 'skip' in place") as caught,
    ):
        pipe(torch.randn(4, WIDTH))
    stage = len(between) + 1
    assert f"stage {stage} has changed" in str(caught.value)
    assert f"pipework: stage {stage}, micro-batch" in caught.value.__notes__[0]


@pytest.mark.one_process("a failure between processes ends the pipe: tests/distributed/together")
@pytest.mark.parametrize("checkpoint", CHECKPOINT_MODES)
@pytest.mark.parametrize("balance", [[1, 2], [1, 1, 2]], ids=str)
def test_also_in_the_stage_that_pops_it(checkpoint: str, balance: list[int]) -> None:
    between = [nn.Identity()] if len(balance) == 3 else []
    module = nn.Sequential(Down(), *between, nn.ReLU(inplace=True), Up())
    pipe = Pipe(module, 2, checkpoint, balance=balance, devices=["cpu"] * len(balance))
    with pytest.raises(RuntimeError, match="changed skip tensor 'skip' in place"):
        pipe(torch.randn(4, WIDTH))


@skippable(pop=["skip"])
class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        skip = yield pop("skip")
        return torch.tanh(self.linear(x)) + skip


@pytest.mark.one_process("one block for each stage; with processes: tests/distributed/together/test_skips.py")
@pytest.mark.parametrize("checkpoint", CHECKPOINT_MODES)
def test_a_residual_that_every_block_pops_is_bitwise_equal(
    way: Any, checkpoint: str, assert_trained_alike: Callable[..., None]
) -> None:
    plain = nn.Sequential(Down(), *(Residual() for _ in range(5)))
    verify_skippables(plain)
    pipe = way.pipe(plain, 3, checkpoint, balance=[1] * 6)
    assert_trained_alike(plain, pipe, [(torch.randn(6, WIDTH),) for _ in range(2)], way=way)


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
@pytest.mark.parametrize("checkpoint", CHECKPOINT_MODES)
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
