import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pipework import Pipe
from pipework.model.loss.functions import CountedTargets, function_identity, unwrapped
from pipework.model.loss.settings import LossSettings


class Focal(nn.Module):
    def __init__(self, gamma: float, rank: int = 0) -> None:
        super().__init__()
        self.gamma = gamma
        self.rank = rank
        self.began = object()

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        return (output - target).abs().pow(self.gamma).mean()


class Called:
    def __init__(self, weight: float) -> None:
        self.weight = weight

    def __call__(self, output: Tensor, target: Tensor) -> Tensor:
        return (output - target).mean() * self.weight


def compiled(function: Callable[..., Any]) -> Any:
    return torch.compile(function, backend="eager")


def plain(output: Tensor, target: Tensor, scale: float = 1.0) -> Tensor:
    return (output - target).mean() * scale


def closing_over(rank: int) -> Callable[..., Tensor]:
    def loss(output: Tensor, target: Tensor) -> Tensor:
        if rank == 0:
            print(output.shape)
        return F.mse_loss(output, target)

    return loss


ALIKE: dict[str, Callable[[int], Any]] = {
    "nothing": lambda rank: None,
    "a function of PyTorch": lambda rank: F.cross_entropy,
    "a module of PyTorch": lambda rank: nn.CrossEntropyLoss(torch.ones(3), label_smoothing=0.1).train(rank == 0),
    "a lambda": lambda rank: lambda output, target: (output - target).abs().mean(),
    "a closure": closing_over,
    "a partial": lambda rank: functools.partial(F.cross_entropy, ignore_index=3, weight=torch.ones(3)),
    "a partial of one's own": lambda rank: functools.partial(plain, scale=2.0, device=f"cuda:{rank}", rank=rank),
    "a module of one's own": lambda rank: Focal(2.0, rank),
    "an object": lambda rank: Called(2.0),
    "a method": lambda rank: Called(2.0).__call__,
    "compiled": lambda rank: compiled(plain),
    "compiled on one rank": lambda rank: compiled(plain) if rank else plain,
    "a module, compiled on one rank": lambda rank: compiled(nn.MSELoss()) if rank else nn.MSELoss(),
    "decorated": lambda rank: functools.wraps(plain)(lambda *arguments: plain(*arguments)),
    "scripted": lambda rank: torch.jit.script(nn.MSELoss()),
}
OTHERS: list[tuple[Any, Any]] = [
    (None, F.mse_loss),
    (F.mse_loss, F.l1_loss),
    (nn.MSELoss(), nn.L1Loss()),
    (nn.MSELoss(), nn.MSELoss(reduction="sum")),
    (nn.CrossEntropyLoss(), nn.CrossEntropyLoss(ignore_index=0)),
    (functools.partial(F.cross_entropy, label_smoothing=0.1), functools.partial(F.cross_entropy, label_smoothing=0.2)),
    (functools.partial(plain, scale=1.0), functools.partial(plain, scale=2.0)),
    (Focal(1.0), Focal(2.0)),
    (Called(1.0), Called(2.0)),
]


@pytest.mark.parametrize("kind", ALIKE)
def test_the_same_function_is_told_alike(kind: str) -> None:
    assert function_identity(ALIKE[kind](0)) == function_identity(ALIKE[kind](1))


@pytest.mark.parametrize("number", range(len(OTHERS)))
def test_other_functions_are_told_apart(number: int) -> None:
    one, other = OTHERS[number]
    assert function_identity(one) != function_identity(other)


WEIGHT = torch.tensor([1.0, 2.0, 0.5, 4.0, 0.0], dtype=torch.float64)


class Subclass(nn.CrossEntropyLoss):
    """Computes what its base does."""


class Own(nn.CrossEntropyLoss):
    """Computes something else."""

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        return super().forward(output * 2, target)


LOSSES = {
    "function": F.cross_entropy,
    "ignored class": nn.CrossEntropyLoss(ignore_index=3),
    "weights of classes": nn.CrossEntropyLoss(weight=WEIGHT),
    "weights in a partial": functools.partial(F.cross_entropy, weight=WEIGHT, ignore_index=1),
    "subclass": Subclass(ignore_index=3),
    "smoothed": functools.partial(F.cross_entropy, label_smoothing=0.1),
}


def padded() -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    x, y = torch.randn(16, 6, dtype=torch.float64), torch.randint(0, 5, (16,))
    y[:7] = -100  # the first micro-batch has nothing else
    return x, y


def ignored(loss_fn: Any) -> int:
    counted = CountedTargets.of(loss_fn)
    assert counted is not None
    return counted.ignored


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("schedule", ["gpipe", "zb-h1"])
def test_the_mean_is_over_the_targets_that_count(name: str, schedule: str) -> None:
    loss_fn: Callable[..., Any] = LOSSES[name]
    x, y = padded()
    y[:7] = ignored(loss_fn)
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
    y[:padded_rows] = ignored(LOSSES[name])
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


@functools.wraps(F.cross_entropy)
def wrapping(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output * 2, target)


INNER = functools.partial(F.cross_entropy, ignore_index=3)


@pytest.mark.parametrize(
    ("loss_fn", "counted"),
    [
        (None, None),
        (F.mse_loss, None),
        (functools.partial(F.cross_entropy, torch.ones(1)), None),
        (nn.CrossEntropyLoss(ignore_index=3), CountedTargets(3)),
        (nn.NLLLoss(ignore_index=3), CountedTargets(3)),
        (Subclass(ignore_index=3), CountedTargets(3)),
        (Own(ignore_index=3), None),
        (F.cross_entropy, CountedTargets()),
        (INNER, CountedTargets(3)),
        (functools.partial(compiled(F.cross_entropy), ignore_index=3), CountedTargets(3)),
        (functools.partial(compiled(INNER), ignore_index=1), CountedTargets(1)),
        (wrapping, None),
    ],
)
def test_which_targets_a_function_counts(loss_fn: Any, counted: CountedTargets | None) -> None:
    assert CountedTargets.of(loss_fn) == counted
    if loss_fn is not None:
        assert CountedTargets.of(compiled(loss_fn)) == counted
        assert unwrapped(compiled(loss_fn))[0] is unwrapped(loss_fn)[0]


@pytest.mark.parametrize("reduction", ["sum", "none"])
def test_a_reduction_in_a_partial_or_a_compiled_function_is_seen(reduction: str) -> None:
    for loss_fn in (functools.partial(F.cross_entropy, reduction=reduction), F.cross_entropy):
        with pytest.raises(ValueError, match=r"loss_fn \(cross_entropy\) has reduction='"):
            LossSettings(compiled(loss_fn), "mean" if loss_fn is not F.cross_entropy else "sum")


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
def test_a_compiled_function_has_the_mean_of_the_function() -> None:
    x, y = padded()
    module = nn.Sequential(nn.Linear(6, 5)).double()
    loss_fn = torch.compile(F.cross_entropy, backend="eager")
    pipe = Pipe(module, 4, loss_fn=loss_fn, balance=[1], devices=["cpu"])
    torch.testing.assert_close(pipe(x, target=y), F.cross_entropy(module(x), y))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_weights_are_summed_exactly(dtype: torch.dtype) -> None:
    targets = [torch.zeros(1023, dtype=torch.long), torch.zeros(255, dtype=torch.long)]
    targets[0][0] = -100
    assert CountedTargets(weight=torch.ones(2, dtype=dtype)).amounts(targets) == [1022.0, 255.0]


def test_a_byte_is_no_negative_number_and_probabilities_count_by_rows() -> None:
    targets = [torch.tensor([156, 1], dtype=torch.uint8), torch.tensor([0], dtype=torch.uint8)]
    assert CountedTargets().amounts(targets) == [2.0, 1.0]
    assert CountedTargets(156).amounts(targets) == [1.0, 1.0]
    assert CountedTargets(156, torch.arange(200.0)).amounts(targets) == [1.0, 0.0]
    assert CountedTargets().amounts([torch.rand(3, 4)]) is None
