import copy

import pytest
import torch
from torch import nn

from pipework import Pipe
from pipework.runtime.stage.buffers import MutableBuffers


class Counter(nn.Module):
    """Changes a buffer in place, replaces another, and has a constant one."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.register_buffer("in_place", torch.zeros(2))
        self.register_buffer("replaced", torch.zeros(()))
        self.register_buffer("mask", torch.ones(100_000))
        self.register_buffer("nothing", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.in_place += x.detach().mean(0)
        self.replaced = self.replaced + 1
        return x * self.weight * self.in_place.clone() * self.replaced * self.mask[0]


class CountsLater(nn.Module):
    """Does not change its buffer in the first pass."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x[0, 0] != 0:
            self.calls += 1
        return x * self.weight


def test_buffers_that_change_are_learned_and_constants_are_not_cloned_again() -> None:
    layer = Counter()
    buffers = MutableBuffers([layer])
    before = buffers.snapshot()
    layer(torch.ones(1, 2))
    kept = buffers.learn(before)
    assert sorted(slot.name for slot, _ in kept.clones) == ["in_place", "nothing", "replaced"]
    assert sorted(slot.name for slot, _ in buffers.snapshot().clones) == ["in_place", "nothing", "replaced"]


def test_the_second_pass_finds_what_the_first_found_and_leaves_no_trace() -> None:
    layer = Counter()
    buffers = MutableBuffers([layer])
    before = buffers.snapshot()
    x = torch.full((1, 2), 3.0)
    first = layer(x)
    kept = buffers.learn(before)
    after = copy.deepcopy(layer.state_dict())
    for again in (True, True, False):
        with kept.standing_in(again=again):
            assert torch.equal(layer(x), first)
        assert all(map(torch.equal, layer.state_dict().values(), after.values()))


@pytest.mark.parametrize("checkpoint", ["never", "except_last", "always"])
@pytest.mark.parametrize("norm", [nn.BatchNorm1d, Counter, "momentum=None", "spectral_norm", "used twice in one stage"])
def test_buffers_count_every_micro_batch_once(checkpoint: str, norm: object) -> None:
    def layers() -> nn.Sequential:
        linear = nn.Linear(2, 2)
        middle: nn.Module
        if norm == "momentum=None":
            middle = nn.BatchNorm1d(2, momentum=None)
        elif norm == "spectral_norm":
            middle = nn.utils.spectral_norm(nn.Linear(2, 2))
        elif norm == "used twice in one stage":
            middle = nn.BatchNorm1d(2)
            return nn.Sequential(linear, nn.Tanh(), middle, nn.Sequential(nn.Tanh(), middle))
        else:
            middle = norm(2) if norm is nn.BatchNorm1d else norm()
        return nn.Sequential(linear, middle, nn.Tanh(), nn.Linear(2, 2))

    torch.manual_seed(0)
    plain = layers().double()
    pipe = Pipe(copy.deepcopy(plain), 3, checkpoint, balance=[2, 2], devices=["cpu"] * 2)
    for _ in range(2):
        x = torch.randn(9, 2, dtype=torch.float64)
        outputs = [plain(part) for part in x.tensor_split(3)]
        torch.cat(outputs).square().sum().backward()
        pipe(x).square().sum().backward()
    for name, expected in plain.state_dict().items():
        assert torch.equal(pipe.state_dict()[name], expected), name
    for expected, actual in zip(plain.parameters(), pipe.parameters(), strict=True):
        torch.testing.assert_close(actual.grad, expected.grad, rtol=1e-9, atol=1e-12)


def test_retained_graphs_recompute_from_the_same_buffers() -> None:
    pipe = Pipe(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)), 2, "always")
    loss = pipe(torch.randn(6, 2)).square().sum()
    loss.backward(retain_graph=True)
    first = pipe[0].weight.grad.clone()
    loss.backward()
    assert torch.equal(pipe[0].weight.grad, 2 * first)
    assert pipe[1].num_batches_tracked == 2


def test_a_buffer_that_changes_late_is_not_counted_twice() -> None:
    pipe = Pipe(nn.Sequential(CountsLater()), 1, "always", balance=[1])
    pipe(torch.zeros(1, 2)).sum().backward()
    for _ in range(3):
        pipe(torch.ones(1, 2)).sum().backward()
    assert pipe[0].calls == 3


class MultipliesByCalls(nn.Module):
    """Multiplies by the number of its calls, kept in the first element of a buffer; counts only if told to."""

    def __init__(self, size: int | None, in_place: bool = True) -> None:
        super().__init__()
        self.counting = True
        self.in_place = in_place
        if size is not None:
            self.register_buffer("calls", torch.zeros(size))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not hasattr(self, "calls"):
            self.register_buffer("calls", torch.zeros(1))
        if self.counting:
            if self.in_place:
                self.calls += 1
            else:
                self.calls = self.calls + 1
        return x * self.calls[0].item()


def input_gradient(pipe: Pipe) -> list[float]:
    x = torch.ones(4, 1, requires_grad=True)
    pipe(x).sum().backward()
    return x.grad.flatten().tolist()


def four_chunks(layer: nn.Module, checkpoint: str) -> Pipe:
    return Pipe(nn.Sequential(nn.Identity(), layer), 4, checkpoint, balance=[1, 1], devices=["cpu"] * 2)


@pytest.mark.parametrize("checkpoint", ["never", "except_last", "always"])
@pytest.mark.parametrize("in_place", [True, False])
def test_a_buffer_that_is_registered_in_the_first_forward(in_place: bool, checkpoint: str) -> None:
    layer = MultipliesByCalls(None, in_place)
    pipe = four_chunks(layer, checkpoint)
    assert input_gradient(pipe) == [1, 2, 3, 4]
    assert layer.calls.item() == 4
    assert input_gradient(pipe) == [5, 6, 7, 8]
    assert layer.calls.item() == 8


@pytest.mark.parametrize("checkpoint", ["never", "except_last", "always"])
@pytest.mark.parametrize("in_place", [True, False])
def test_a_small_buffer_that_changes_in_a_later_mini_batch(in_place: bool, checkpoint: str) -> None:
    layer = MultipliesByCalls(1, in_place)
    pipe = four_chunks(layer, checkpoint)
    layer.counting = False
    assert input_gradient(pipe) == [0, 0, 0, 0]
    layer.counting = True
    assert input_gradient(pipe) == [1, 2, 3, 4]
    assert layer.calls.item() == 4


@pytest.mark.parametrize("in_place", [True, False])
def test_a_large_buffer_that_changes_in_a_later_mini_batch(in_place: bool) -> None:
    for checkpoint in ("never", "except_last", "always"):
        layer = MultipliesByCalls(20_000, in_place)
        pipe = four_chunks(layer, checkpoint)
        layer.counting = False
        assert input_gradient(pipe) == [0, 0, 0, 0]
        layer.counting = True
        if checkpoint == "never":
            assert input_gradient(pipe) == [1, 2, 3, 4]
        else:
            with pytest.raises(RuntimeError, match="buffer"):
                input_gradient(pipe)


@pytest.mark.parametrize("checkpoint", ["never", "except_last", "always"])
def test_a_large_buffer_that_changes_from_the_first_mini_batch_on(checkpoint: str) -> None:
    pipe = four_chunks(MultipliesByCalls(20_000), checkpoint)
    assert input_gradient(pipe) == [1, 2, 3, 4]
    assert input_gradient(pipe) == [5, 6, 7, 8]


class CountsTokens(nn.Linear):
    def __init__(self, *, in_buffer: bool) -> None:
        super().__init__(4, 4)
        if in_buffer:
            self.register_buffer("tokens", torch.zeros((), dtype=torch.long))
        else:
            self.tokens = torch.zeros((), dtype=torch.long)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.tokens += x.numel()
        return super().forward(x)


@pytest.mark.parametrize(
    ("in_buffer", "checkpoint", "counted"), [(True, "always", 32), (False, "always", 64), (False, "never", 32)]
)
def test_what_the_page_of_traps_says_of_counters(in_buffer: bool, checkpoint: str, counted: int) -> None:
    layer = CountsTokens(in_buffer=in_buffer)
    pipe = Pipe(nn.Sequential(layer, nn.Linear(4, 4)), 4, checkpoint, devices=["cpu"] * 2)
    pipe(torch.ones(8, 4)).sum().backward()
    assert layer.tokens == counted
