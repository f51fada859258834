"""A recomputation finds the buffers of the first pass, and is compared with it; layers know in which pass they are."""

import copy
import random
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from pipework import Pipe
from pipework.runtime.stage.recomputation import MINI_BATCHES, MutableBuffers, RecomputeCheck


class Counter(nn.Module):
    """Changes a buffer in place, replaces another, and has a constant one."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.register_buffer("in_place", torch.zeros(2))
        self.register_buffer("replaced", torch.zeros(()))
        self.register_buffer("mask", torch.ones(100_000))
        self.register_buffer("nothing", None)

    def forward(self, x: Tensor) -> Tensor:
        self.in_place += x.detach().mean(0)
        self.replaced = self.replaced + 1
        return x * self.weight * self.in_place.clone() * self.replaced * self.mask[0]


def test_the_second_pass_finds_what_the_first_found_and_leaves_no_trace() -> None:
    layer = Counter()
    buffers = MutableBuffers([layer])
    before = buffers.snapshot()
    x = torch.full((1, 2), 3.0)
    first = layer(x)
    kept = buffers.learn(before)
    for clones in (kept.clones, buffers.snapshot().clones):  # without the mask, which is large and did not change
        assert sorted(slot.name for slot, _ in clones) == ["in_place", "nothing", "replaced"]
    after = copy.deepcopy(layer.state_dict())
    for again in (True, True, False):
        with kept.standing_in(again=again):
            assert torch.equal(layer(x), first)
        assert all(map(torch.equal, layer.state_dict().values(), after.values()))


@pytest.mark.parametrize("now", [torch.ones(3), torch.ones(2).double(), torch.ones(2), None])
def test_restored_buffers_have_their_shape_and_type_again(now: Tensor | None) -> None:
    layer = Counter()
    buffers = MutableBuffers([layer])
    before = buffers.snapshot()
    layer.in_place = now
    buffers.restore(before)
    assert layer.in_place.dtype is torch.float32
    assert torch.equal(layer.in_place, torch.zeros(2))


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


class MultipliesByCalls(nn.Module):
    """Multiplies by the number of its calls, kept in the first element of a buffer; counts only if told to."""

    def __init__(self, size: int | None, in_place: bool = True) -> None:
        super().__init__()
        self.counting = True
        self.in_place = in_place
        if size is not None:
            self.register_buffer("calls", torch.zeros(size))

    def forward(self, x: Tensor) -> Tensor:
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


@pytest.mark.parametrize("in_place", [True, False])
def test_a_buffer_may_come_or_change_later_if_it_is_small(in_place: bool, checkpoint: str) -> None:
    layer = MultipliesByCalls(None, in_place)  # registered in the first forward
    pipe = four_chunks(layer, checkpoint)
    assert input_gradient(pipe) == [1, 2, 3, 4]
    assert input_gradient(pipe) == [5, 6, 7, 8]
    assert layer.calls.item() == 8
    for size in (1, 20_000):
        layer = MultipliesByCalls(size, in_place)
        pipe = four_chunks(layer, checkpoint)
        layer.counting = False
        assert input_gradient(pipe) == [0, 0, 0, 0]
        layer.counting = True
        if size == 1 or checkpoint == "never":
            assert input_gradient(pipe) == [1, 2, 3, 4]
            assert layer.calls[0].item() == 4
        else:
            with pytest.raises(RuntimeError, match="buffer"):
                input_gradient(pipe)


# Outputs are compared


class Scaled(nn.Module):
    """Multiplies by a number that a function gives."""

    def __init__(self, factor: Callable[[], float | Tensor]) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * self.factor()


def train(factor: Callable[[], float | Tensor], checkpoint: str = "except_last") -> None:
    layers = nn.Sequential(nn.Linear(4, 4), Scaled(factor), nn.Tanh())
    pipe = Pipe(layers, 4, checkpoint, balance=[1, 2], devices=["cpu"] * 2)
    for _ in range(2):
        pipe(torch.randn(8, 4)).sum().backward()


def sources() -> dict[str, Callable[[], float | Tensor]]:
    own, count = torch.Generator(), iter(range(1, 1000))
    return {
        "random": random.random,
        "own generator": lambda: torch.rand((), generator=own),
        "counter": lambda: 1 + 0.1 * next(count),
    }


@pytest.mark.parametrize("source", sources())
def test_what_cannot_be_drawn_again_is_an_error_at_the_stage(source: str) -> None:
    with pytest.raises(RuntimeError, match=r"stage 1 \(layers '1' to '2'\) gave another output.*checkpoint='never'"):
        train(sources()[source])
    train(sources()[source], "never")


def test_what_both_passes_agree_on_is_none() -> None:
    train(lambda: torch.rand(()))
    train(lambda: float("nan"))
    train(lambda: float("inf"))


ONES = torch.tensor([1.0, 1e-6, torch.nan, torch.inf])


@pytest.mark.parametrize("values", [ONES, torch.complex(ONES[:2], ONES[:2]), torch.arange(3.0), torch.zeros(0)])
def test_rounding_is_none(values: Tensor) -> None:
    check = RecomputeCheck(iter([0]))
    check.keep(0, [values])
    check.compare(0, [values * (1 + 1e-6)], "stage 0")


@pytest.mark.parametrize("again", [torch.ones(3), torch.ones(2).double(), torch.tensor([1.0, 1.01])])
def test_other_values_shapes_and_dtypes_are_others(again: Tensor) -> None:
    check = RecomputeCheck(iter([0]))
    check.keep(1, [torch.ones(2)])
    check.compare(0, [again], "stage 0")
    with pytest.raises(RuntimeError, match="stage 0 gave another output"):
        check.compare(1, [again], "stage 0")


def test_only_the_first_micro_batch_of_some_mini_batches_is_kept() -> None:
    looks = iter(range(MINI_BATCHES))
    for mini_batch in range(MINI_BATCHES + 1):
        check = RecomputeCheck(looks)
        check.keep(0, [torch.zeros(2)])
        check.keep(1, [torch.zeros(2)])
        check.compare(1, [torch.ones(2)], "stage 0")
        if mini_batch == MINI_BATCHES:
            check.compare(0, [torch.ones(2)], "stage 0")
