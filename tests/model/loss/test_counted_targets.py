"""A loss that leaves out padded targets, or weighs classes: the pipe's is that of the whole mini-batch."""

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from pipework import Pipe
from pipework.model.loss.counted_targets import CountedTargets, ignored_by, unequal_padding
from pipework.model.loss.settings import LossSettings

WEIGHT = torch.tensor([1.0, 2.0, 0.5, 4.0, 0.0], dtype=torch.float64)


class Subclass(nn.CrossEntropyLoss):
    """Computes what its base does."""


class Own(nn.CrossEntropyLoss):
    """Computes something else."""

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        return super().forward(output * 2, target)


LOSSES = {
    "function": functional.cross_entropy,
    "ignored class": nn.CrossEntropyLoss(ignore_index=3),
    "weights of classes": nn.CrossEntropyLoss(weight=WEIGHT),
    "weights in a partial": functools.partial(functional.cross_entropy, weight=WEIGHT, ignore_index=1),
    "subclass": Subclass(ignore_index=3),
    "smoothed": functools.partial(functional.cross_entropy, label_smoothing=0.1),
}


def padded() -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    x, y = torch.randn(16, 6, dtype=torch.float64), torch.randint(0, 5, (16,))
    y[:7] = -100  # the first micro-batch has nothing else
    return x, y


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("schedule", ["gpipe", "zb-h1"])
def test_the_mean_is_over_the_targets_that_count(name: str, schedule: str) -> None:
    loss_fn: Callable[..., Any] = LOSSES[name]
    x, y = padded()
    y[:7] = ignored_by(loss_fn)
    module = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 5)).double()
    plain = copy.deepcopy(module)
    pipe = Pipe(module, 4, schedule=schedule, loss_fn=loss_fn, balance=[1, 2], devices=["cpu", "cpu"])
    loss, expected = pipe(x, target=y), loss_fn(plain(x), y)
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=0)
    loss.backward()
    expected.backward()
    for parameter, own in zip(pipe.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, own.grad, rtol=1e-10, atol=1e-14)


@pytest.mark.gpu
@pytest.mark.parametrize("name", [name for name in LOSSES if name != "weights in a partial"])  # they stay on the CPU
@pytest.mark.parametrize("padded_rows", [7, 16])
def test_what_stays_on_the_device_weighs_as_on_the_host(name: str, padded_rows: int) -> None:
    gpu = torch.accelerator.current_accelerator()
    x, y = padded()
    y[:padded_rows] = ignored_by(LOSSES[name])
    module = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 5)).double()
    results = []
    for device in ("cpu", f"{gpu.type}:0"):
        layers, loss_fn = copy.deepcopy(module), copy.deepcopy(LOSSES[name])
        pipe = Pipe(layers, 4, schedule="1f1b", loss_fn=loss_fn, balance=[1, 2], devices=[device] * 2)
        loss = pipe(x, target=y)
        loss.backward()
        results.append([loss.detach().cpu(), *(parameter.grad.cpu() for parameter in pipe.parameters())])
    tolerance = 0 if gpu.type == "sim" else 1e-9
    for actual, expected in zip(*results, strict=True):
        torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance, equal_nan=True)


def test_probabilities_and_other_functions_count_by_rows() -> None:
    assert CountedTargets().amounts([torch.rand(3, 4)]) is None
    assert CountedTargets.of(functional.mse_loss) is None
    assert CountedTargets.of(functools.partial(functional.cross_entropy, torch.ones(1))) is None
    assert CountedTargets.of(None) is None


@pytest.mark.parametrize("kind", [nn.CrossEntropyLoss, nn.NLLLoss, Subclass, Own])
def test_a_module_and_what_is_compiled_of_it(kind: type[nn.CrossEntropyLoss]) -> None:
    loss_fn = kind(ignore_index=3)
    both = loss_fn, torch.compile(loss_fn, backend="eager")
    assert [CountedTargets.of(each) for each in both] == [None if kind is Own else CountedTargets(3)] * 2
    assert [ignored_by(each) for each in both] == [3, 3]


def test_wrappers_around_a_function() -> None:
    def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
        return torch.compile(function, backend="eager")

    plain, inner = functional.cross_entropy, functools.partial(functional.cross_entropy, ignore_index=3)
    assert CountedTargets.of(compiled(plain)) == CountedTargets()
    for loss_fn in (compiled(inner), functools.partial(compiled(plain), ignore_index=3), compiled(compiled(inner))):
        assert CountedTargets.of(loss_fn) == CountedTargets(3)
        assert ignored_by(loss_fn) == 3
    outer = functools.partial(compiled(inner), ignore_index=1)
    assert CountedTargets.of(outer) == CountedTargets(1)

    @functools.wraps(plain)
    def own(output: Tensor, target: Tensor) -> Tensor:
        return plain(output * 2, target)

    assert CountedTargets.of(own) is None
    assert CountedTargets.of(compiled(own)) is None
    with pytest.raises(ValueError, match=r"loss_fn \(cross_entropy\) has reduction='mean'"):
        LossSettings(compiled(plain), "sum")


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
def test_a_compiled_function_has_the_mean_of_the_function() -> None:
    x, y = padded()
    module = nn.Sequential(nn.Linear(6, 5)).double()
    loss_fn = torch.compile(functional.cross_entropy, backend="eager")
    pipe = Pipe(module, 4, loss_fn=loss_fn, balance=[1], devices=["cpu"])
    torch.testing.assert_close(pipe(x, target=y), functional.cross_entropy(module(x), y))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_weights_are_summed_exactly(dtype: torch.dtype) -> None:
    targets = [torch.zeros(1023, dtype=torch.long), torch.zeros(255, dtype=torch.long)]
    targets[0][0] = -100
    assert CountedTargets(weight=torch.ones(2, dtype=dtype)).amounts(targets) == [1022.0, 255.0]


def test_a_byte_is_no_negative_number() -> None:
    targets = [torch.tensor([156, 1], dtype=torch.uint8), torch.tensor([0], dtype=torch.uint8)]
    assert CountedTargets().amounts(targets) == [2.0, 1.0]
    assert CountedTargets(156).amounts(targets) == [1.0, 1.0]
    assert CountedTargets(156, torch.arange(200.0)).amounts(targets) == [1.0, 0.0]


def test_equal_padding_needs_no_weights() -> None:
    padded_alike = [torch.tensor([1, -100]), torch.tensor([-100, 2])]
    assert not unequal_padding(padded_alike, [2, 2])
    assert unequal_padding([*padded_alike, torch.tensor([1])], [2, 2, 1])
    assert not unequal_padding([torch.tensor([0.5])], [1])


@pytest.mark.parametrize("reduction", ["sum", "none"])
def test_a_reduction_in_a_partial_is_seen(reduction: str) -> None:
    loss_fn = functools.partial(functional.cross_entropy, reduction=reduction)
    with pytest.raises(ValueError, match=rf"loss_fn \(cross_entropy\) has reduction='{reduction}'"):
        Pipe(nn.Sequential(nn.Linear(2, 2), nn.Tanh()), 2, loss_fn=loss_fn, devices=["cpu", "cpu"])
