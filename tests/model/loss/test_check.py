"""Loss functions that are not what the pipe takes them for are noticed, and sums told from means."""

import gc
import math
import random
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from pipework import MicroBatches, NoChunk, Pipe, PipeWarning
from pipework.runtime.stage.loss import InnerLoss
from pipework.testing import reference_step


def pipe_of(
    loss_fn: Callable[..., Any], *, schedule: str = "1f1b", last: nn.Module | None = None, **options: Any
) -> Pipe:
    layers = nn.Sequential(nn.Linear(4, 4), last or nn.Linear(4, 4))
    return Pipe(layers, 4, balance=[1, 1], devices=["cpu"] * 2, schedule=schedule, loss_fn=loss_fn, **options)


def rows_of(count: int) -> Tensor:
    """Rows of which the later ones are larger, so that the losses of micro-batches differ."""
    return torch.randn(count, 4) * torch.linspace(1, 4, count)[:, None]


def total(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().sum()


def root(output: Tensor, target: Tensor) -> Tensor:
    return functional.mse_loss(output, target).sqrt()


def contrastive(output: Tensor, target: Tensor) -> Tensor:
    scores = functional.normalize(output) @ functional.normalize(target).T
    return functional.cross_entropy(scores, torch.arange(len(output)))


OTHER = {"root": root, "contrastive": contrastive, "logsumexp": lambda output, target: output.logsumexp(0).mean()}


@pytest.mark.parametrize(("name", "grad"), [*((name, True) for name in OTHER), ("root", False)])
def test_functions_of_the_whole_batch(name: str, grad: bool) -> None:
    pipe, x = pipe_of(OTHER[name], schedule="1f1b" if grad else "gpipe"), rows_of(16)
    expected = pytest.warns(PipeWarning, match=r"is no mean over rows: .*\(8 rows\) it gives .*outside of the pipe")
    with expected as seen, torch.set_grad_enabled(grad):
        pipe(x, target=x)
    assert [each.filename for each in seen] == [__file__]
    form = r"micro-batches (\d) and (\d) together .* it gives ([-\d.]+), .* make ([-\d.]+) in the pipe\."
    numbers = re.search(form, str(seen[0].message))
    assert numbers is not None
    pairs = list(zip(nn.Sequential(*pipe)(x).split(4), x.split(4), strict=True))
    one, other = (pairs[int(number)] for number in numbers.groups()[:2])
    parts = [OTHER[name](*each).item() for each in (one, other)]
    together = map(torch.cat, zip(one, other, strict=True))
    assert float(numbers[3]) == pytest.approx(OTHER[name](*together).item(), rel=1e-5)
    assert float(numbers[4]) == pytest.approx(sum(parts) / 2, rel=1e-5)
    pipe(x, target=x).backward()  # warnings are errors


class Counting(nn.Module):
    """A mean that is weighed by the number of its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))
        self.seen: list[int] = []

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        self.calls += 1
        self.seen.append(len(output))
        return functional.mse_loss(output, target) * self.calls


def masked(output: Tensor, target: Tensor) -> Tensor:
    return functional.cross_entropy(output, target, ignore_index=-1)


def overwriting(output: Tensor, target: Tensor) -> Tensor:
    return functional.mse_loss(output.mul_(2), target)


def drawing(output: Tensor, target: Tensor) -> Tensor:
    noise = random.random() + np.random.rand()
    return functional.mse_loss(functional.dropout(output), target + noise * torch.randn_like(target))


def with_gradient(output: Tensor, target: Tensor) -> Tensor:
    (slope,) = torch.autograd.grad(output.square().sum(), output, create_graph=True)
    return slope.square().mean()


RIGHT: dict[str, tuple[Callable[..., Any], str]] = {
    "a mean": (lambda output, target: (output - target).abs().mean(), "rows"),
    "a scaled one": (lambda output, target: functional.mse_loss(output, target) / 4 + 1, "rows"),
    "bound": (partial(functional.huber_loss, delta=0.1), "rows"),
    "classes": (lambda output, target: functional.cross_entropy(output, target), "classes"),
    "of PyTorch": (nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 3.0, 4.0])), "classes"),
    "near 0": (lambda output, target: (output - output.detach()).mean(), "rows"),
    "a state": (Counting(), "rows"),
    "overwriting": (overwriting, "rows"),
    "drawing": (drawing, "rows"),
    "with a gradient": (with_gradient, "rows"),
    "not a number": (lambda output, target: functional.mse_loss(output, target) * math.nan, "rows"),
    "one target": (lambda output, target: functional.mse_loss(output @ target, output), "whole"),
    "nested": (lambda output, target: functional.l1_loss(output, target["y"]), "dict"),
}


@pytest.mark.parametrize("name", RIGHT)
@pytest.mark.parametrize("rows", [16, 10])
def test_right_programs(name: str, rows: int) -> None:
    loss_fn, kind = RIGHT[name]
    target: Any = {
        "rows": torch.randn(rows, 4),
        "classes": torch.arange(rows) % 4,
        "whole": NoChunk(torch.randn(4, 4)),
        "dict": {"y": torch.randn(rows, 4), "name": "rows"},
    }[kind]
    pipe_of(loss_fn)(torch.randn(rows, 4), target=target)


LEFT_OUT: dict[str, tuple[float, Callable[[Tensor], Tensor]]] = {
    "the least": (-1, lambda target: target >= 0),
    "the greatest": (9, lambda target: target < 9),
    "zero": (0, lambda target: target != 0),
    "the most frequent": (2, lambda target: target != 2),
    "NaN": (math.nan, lambda target: ~target.isnan()),
}


@pytest.mark.parametrize("name", LEFT_OUT)
@pytest.mark.parametrize(("batch", "first"), [(0, 10), (2, 3), (31, 12)])
def test_padding_in_any_micro_batch_and_later_mini_batches(name: str, batch: int, first: int) -> None:
    """Neither the first two micro-batches nor the first mini-batch need have it."""
    mark, counts = LEFT_OUT[name]

    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        return (output[:, 0] - target).square()[counts(target)].sum() / counts(target).sum().clamp(min=1)

    pipe, y = pipe_of(loss_fn), 1 + torch.arange(16) % 4
    y = (y.float() if math.isnan(mark) else y).where(counts(y), y.new_tensor(3))
    for _ in range(batch):
        pipe(rows_of(16), target=y).backward()
    y[first : first + 3] = mark
    with pytest.warns(PipeWarning, match=rf"for micro-batches .*{first // 4}.* over something else, give loss_weight="):
        pipe(rows_of(16), target=y)
    pipe(rows_of(16), target=y).backward()  # warnings are errors
    counted = pipe_of(loss_fn, loss_weight=lambda target: counts(target).sum())
    counted(rows_of(16), target=y).backward()


class Masked(nn.Linear):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return super().forward(x), x[:, 0] != 0


def test_padding_of_inputs_that_the_output_knows() -> None:
    def loss_fn(output: tuple[Tensor, Tensor], target: Tensor) -> Tensor:
        return (output[0] - target).square().mean(1)[output[1]].mean()

    x, y = rows_of(16), torch.randn(16, 4)
    x[9:12, 0] = 0
    pipe = Pipe(nn.Sequential(Masked(4, 4)), 4, devices=["cpu"], loss_fn=loss_fn)
    with pytest.warns(PipeWarning, match="is no mean over rows: for micro-batches .*2"):
        pipe(x, target=y)


def test_padding_and_a_weight() -> None:
    x, y = rows_of(16), torch.arange(16) % 4
    y[:3] = -1
    pipe_of(masked, loss_weight=lambda target: (target >= 0).sum())(x, target=y).backward()
    with pytest.warns(PipeWarning, match="is no mean over rows: .* over something else, give loss_weight="):
        pipe_of(masked)(x, target=y)
    y[:3] = -100
    with pytest.warns(PipeWarning, match="targets have the value -100") as seen:
        pipe_of(lambda output, target: functional.cross_entropy(output, target))(x, target=y)
    assert len(seen) == 1


class Two(nn.Linear):
    def __init__(self, mean: bool) -> None:
        super().__init__(4, 4)
        self.mean = mean

    def forward(self, x: Tensor) -> Any:
        return {"rows": super().forward(x), "more": (x, x.mean() if self.mean else None)}


def test_nested_outputs_and_micro_batches_of_the_caller() -> None:
    def loss_fn(output: Any, target: Tensor) -> Tensor:
        return root(output["rows"] if isinstance(output, dict) else output, target)

    x = rows_of(16)
    pipe_of(loss_fn, last=Two(mean=True))(x, target=x)  # a mean over the rows cannot be joined
    with pytest.warns(PipeWarning, match="is no mean over rows"):
        pipe_of(loss_fn, last=Two(mean=False))(x, target=x)
    given = MicroBatches([torch.randn(4, 4), torch.randn(4, 4)])
    pipe = pipe_of(loss_fn)
    pipe(given, target=given)
    with pytest.warns(PipeWarning, match="is no mean over rows"):
        pipe(x, target=x)


def padded(count: int) -> Tensor:
    target = torch.arange(count) % 4
    target[:3] = -100
    return target


def counted(target: Tensor) -> Tensor:
    return (target != -100).sum()


def sum_of_counted(output: Tensor, target: Tensor) -> Tensor:
    return functional.cross_entropy(output, target, reduction="sum")


def by_rows(output: Tensor, target: Tensor) -> Tensor:
    return functional.cross_entropy(output, target, reduction="sum") / len(target)


@pytest.mark.parametrize(
    ("loss_fn", "options", "advice"),
    [
        (sum_of_counted, {}, r'leave out of their mean, .*; or loss_reduction="sum", if it is a sum'),
        (sum_of_counted, {"loss_weight": counted}, r'is no weighted mean: .* loss_r.*="sum" and no loss_weight='),
        (masked, {"loss_weight": len}, "is no weighted mean: .* over something else, give loss_weight="),
        (total, {"loss_weight": lambda target: target.ne(0).sum()}, "seems to be a sum"),
        (by_rows, {"loss_weight": counted}, "is no weighted mean: .*a mean over rows, leave .* loss_weight= out"),
        (
            functional.cross_entropy,
            {"loss_weight": len},
            "is no weighted mean: .* over something else, give loss_weight=",
        ),
        (by_rows, {"loss_reduction": "sum"}, "is no sum: .* a mean over rows, leave loss_reduction="),
        (sum_of_counted, {"loss_weight": counted, "loss_scale": 0.25}, "is no weighted mean: .* seems to be a sum"),
    ],
)
def test_sum_and_mean_are_told_apart_also_with_a_weight(
    loss_fn: Callable[..., Any], options: dict[str, Any], advice: str
) -> None:
    x, y = rows_of(16), padded(16)
    if loss_fn is masked:
        y = y.masked_fill(y == -100, -1)
    if loss_fn is total:
        y = x.clone()
        y[:3] = 0
    scale = {"loss_scale": options.pop("loss_scale")} if "loss_scale" in options else {}
    with pytest.warns(PipeWarning, match=advice) as seen:
        pipe_of(loss_fn, **options)(x, target=y, **scale)
    assert len(seen) == 1
    if loss_fn is sum_of_counted:  # as advised
        pipe = pipe_of(loss_fn, loss_reduction="sum")
        whole = sum_of_counted(nn.Sequential(*pipe)(x), y)
        torch.testing.assert_close(pipe(x, target=y, **scale), whole * scale.get("loss_scale", 1.0))


def test_large_outputs_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipework.runtime.stage.loss.MOST_BYTES", 127)
    x = rows_of(16)
    pipe_of(root)(x, target=x)


def test_half_precision_is_compared_as_such() -> None:
    x = torch.randn(64, 4)
    with torch.autocast("cpu", torch.bfloat16):
        pipe_of(lambda output, target: (output @ output.T).diagonal().mean())(x, target=x)


def test_a_function_is_called_once_more_and_buffers_do_not_see_it() -> None:
    calls: list[int] = []

    def mean(output: Tensor, target: Tensor) -> Tensor:
        calls.append(len(output))
        return functional.mse_loss(output, target)

    x, counting = rows_of(16), Counting()
    pipe = pipe_of(mean)
    pipe(x, target=x)
    pipe(x, target=x)
    assert calls == [4, 4, 4, 4, 8, 4, 4, 4, 4]
    pipe_of(counting)(x, target=x)
    assert counting.seen == [4, 4, 4, 4, 8, 4]  # alone once more, since the two together had another loss
    assert counting.calls == 4


def test_a_failed_step_keeps_no_sample() -> None:
    def finite(output: Tensor, target: Tensor) -> Tensor:
        if target.isnan().any():
            raise ValueError("not a number")
        return functional.mse_loss(output, target)

    x = rows_of(16)
    x[-1] = math.nan
    with pytest.raises(ValueError, match="not a number") as error:
        pipe_of(finite)(x, target=x)
    losses = [each for each in gc.get_objects() if type(each) is InnerLoss and each.function is finite]
    assert [each.seen for each in losses] == [None]
    assert error.value is not None  # it is alive until here


@pytest.mark.parametrize("checkpoint", ["never", "always"])
def test_the_step_keeps_its_bits(checkpoint: str) -> None:
    """Losses, gradients, generators of random numbers, also of a loss that draws and one that overwrites."""
    x, y = rows_of(16), rows_of(16)
    for loss_fn in (overwriting, lambda output, target: functional.mse_loss(functional.dropout(output), target)):
        layers = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 4))
        pipe = Pipe(layers, 4, checkpoint, balance=[1, 2], devices=["cpu"] * 2, schedule="1f1b", loss_fn=loss_fn)
        torch.manual_seed(1)
        loss = pipe(x, target=y)
        after = torch.rand(())
        loss.backward()
        gradients = [parameter.grad for parameter in pipe.parameters()]
        pipe.zero_grad()
        torch.manual_seed(1)
        key = int(torch.empty((), dtype=torch.int64).random_())
        assert torch.equal(torch.rand(()), after)
        reference = reference_step(layers, x, y, loss_fn, chunks=4, key=key)
        assert torch.equal(loss, reference.loss)
        assert all(torch.equal(p.grad, grad) for p, grad in zip(layers.parameters(), gradients, strict=True))


def test_compiled_functions_are_not_compiled_for_other_rows() -> None:
    compiled: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        compiled.append([getattr(each, "shape", each) for each in inputs])
        return graph

    x = rows_of(16)
    with pytest.warns(PipeWarning, match="is no mean over rows"):
        pipe_of(torch.compile(root, backend=backend))(x, target=x)
    assert len(compiled) == 1
