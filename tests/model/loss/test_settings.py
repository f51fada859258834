"""The loss inside as its user describes it: `target`, `loss_fn`, reductions and weights, and what the pipe returns."""

import copy
import functools
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pipework import MicroBatches, NoChunk, Pipe, PipeSequential, PipeWarning
from pipework.model.loss.settings import CountedTargets, LossSettings, function_identity, unwrapped
from pipework.testing import reference_step

INSIDE = ("gpipe", "1f1b", "interleaved-1f1b", "looped-bfs")
CPU = torch.device("cpu")
inside = pytest.mark.parametrize("way", INSIDE, indirect=True)


def layers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Linear(8, 3))


def same_gradients(actual: nn.Module, expected: nn.Module) -> bool:
    pairs = list(zip(actual.parameters(), expected.parameters(), strict=True))
    return all(torch.equal(a.grad, e.grad) for a, e in pairs if e.grad is not None or a.grad is not None)


def same_step(pipe: Pipe, plain: nn.Module, reference: Any, *inputs: Tensor, target: Any) -> Tensor:
    """The loss of a step, which is that of the plain model, as the gradients are."""
    loss = pipe(*inputs, target=target)
    loss.backward()
    assert torch.equal(loss, reference.loss)
    assert same_gradients(pipe, plain)
    return loss


# The arguments


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"loss_fn": "mse"}, TypeError, "loss_fn is 'mse': wanted a function"),
        ({"loss_fn": nn.CrossEntropyLoss}, TypeError, r"loss_fn is the class CrossEntropyLoss: write CrossEntropyLoss"),
        ({"loss_fn": nn.MSELoss(reduction="sum")}, ValueError, "reduction='sum', and loss_reduction is 'mean'"),
        ({"loss_fn": nn.MSELoss(reduction="none")}, ValueError, "reduction='none'.*make loss_fn with reduction='mean'"),
        ({"loss_fn": nn.MSELoss(), "loss_reduction": "sum"}, ValueError, "='mean', and loss_reduction is 'sum'"),
        ({"loss_fn": partial(F.nll_loss), "loss_reduction": "sum"}, ValueError, r"\(nll_loss\).*'mean'"),
        ({"loss_weight": 3}, TypeError, "loss_weight is 3: wanted a function"),
        ({"loss_reduction": "none"}, ValueError, "loss_reduction is 'none': wanted one of 'mean', 'sum'"),
        ({"loss_reduction": None}, ValueError, "loss_reduction is None"),
        ({"loss_reduction": "sum", "loss_weight": len}, ValueError, "leave one of them out"),
        ({"loss_fn": nn.Linear(1, 1)}, ValueError, r"loss_fn \(Linear\) has parameters.*make it the last layer"),
        ({"grad_scaler": 1024.0}, TypeError, r"grad_scaler is 1024.0: wanted a torch.amp.GradScaler"),
    ],
)
def test_nonsense_is_refused_by_the_constructor(options: dict[str, Any], error: type, message: str) -> None:
    with pytest.raises(error, match=message):
        Pipe(layers(), 2, balance=[4], devices=["cpu"], **options)


def test_the_reduction_of_a_compiled_function_is_seen() -> None:
    with pytest.raises(ValueError, match=r"\(l1_loss\) has reduction='sum'"):
        Pipe(layers(), 2, balance=[4], devices=["cpu"], loss_fn=compiled(partial(F.l1_loss, reduction="sum")))


def test_the_scale_is_asked_for_gradients_only_and_a_disabled_scaler_scales_nothing() -> None:
    for grad, enabled, scale in ((True, True, 8.0), (False, True, 1.0), (True, False, 1.0)):
        settings = LossSettings(F.mse_loss, grad_scaler=torch.amp.GradScaler("cpu", init_scale=8.0, enabled=enabled))
        assert settings.inner([((), None)], [1], CPU, grad=grad, keeps_output=False).seed_scale == scale


def test_buffers_of_a_loss_function_are_moved_and_are_no_part_of_the_state() -> None:
    criterion = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 3.0]))
    pipe = Pipe(layers(), 2, balance=[2, 2], devices=["cpu"] * 2, schedule="1f1b", loss_fn=criterion)
    assert criterion.weight.device == pipe.output_device
    assert list(pipe.state_dict()) == list(layers().state_dict())


# Targets


def nested_loss(output: Tensor, target: Any) -> Tensor:
    # The reference leaves the mark where it is.
    weight = target["whole"].value if isinstance(target["whole"], NoChunk) else target["whole"]
    first = F.cross_entropy(output, target["label"], weight=weight, reduction="sum")
    return (first + (output * target["more"][0]).sum()) * target["factor"] / len(output)


@inside
def test_a_target_may_be_nested(way: Any, checkpoint: str) -> None:
    plain = layers()
    pipe = way.pipe(plain, 3, checkpoint, balance=[1, 1, 1, 1], loss_fn=nested_loss)
    x = torch.randn(7, 4)
    target = {"label": torch.randint(3, (7,)), "more": [torch.randn(7, 3), "words"], "factor": 0.5}
    target["whole"] = NoChunk(torch.tensor([1.0, 5.0, 0.5]))
    reference = reference_step(plain, x, target, nested_loss, 3, key=0)
    same_step(pipe, plain, reference, x, target=target)


@inside
def test_a_target_without_tensors(way: Any) -> None:
    pipe = way.pipe(layers(), 3, balance=[1, 1, 1, 1], loss_fn=lambda output, target: (output * target).mean())
    x = torch.randn(6, 4)
    torch.testing.assert_close(pipe(x, target=3), pipe(x, target=1) * 3)
    assert pipe(x, target=0) == 0  # a target, though it is false


# What comes out


@inside
def test_the_output_beside_the_loss(way: Any, checkpoint: str) -> None:
    class Named(nn.Module):
        def forward(self, x: Tensor) -> dict[str, Any]:
            return {"logits": x, "rows": len(x)}

    pipe = way.pipe(
        nn.Sequential(*layers(), Named()),
        3,
        checkpoint,
        balance=[1, 1, 1, 2],
        loss_fn=lambda output, target: F.cross_entropy(output["logits"], target),
    )
    x, y = torch.randn(7, 4), torch.randint(3, (7,))
    loss, output = pipe(x, target=y, return_output=True)
    assert torch.equal(loss, pipe(x, target=y))
    assert output["rows"] == [3, 2, 2]
    assert not output["logits"].requires_grad
    expected = nn.Sequential(*list(pipe)[:4])
    assert torch.equal(output["logits"], torch.cat([expected(part) for part in x.tensor_split(3)]))
    loss.backward()
    with torch.no_grad():
        evaluated, output_then = pipe(x, target=y, return_output=True)
    assert torch.equal(evaluated, loss)
    assert torch.equal(output_then["logits"], output["logits"])


@inside
@pytest.mark.parametrize("mode", [nn.Module.eval, nn.Module.train])
def test_evaluation(way: Any, mode: Callable[[nn.Module], object]) -> None:
    """Outputs without a target; a loss without gradients under `no_grad`; one with gradients outside of it."""
    plain = nn.Sequential(*layers()[:3], nn.Dropout(0.5))
    pipe = way.pipe(plain, 3, balance=[1, 1, 1, 1])
    for module in (plain, pipe):
        mode(module)
    x, y = torch.randn(7, 4), torch.randn(7)
    if not pipe.training:
        expected = torch.cat([plain(part) for part in x.tensor_split(3)])
        assert torch.equal(pipe(x), expected)
        assert pipe(x).requires_grad
        way.reference(plain, x, y, 3, key=0)
        pipe(x, target=y).backward()
        assert same_gradients(pipe, plain)
        pipe.zero_grad()
    with torch.no_grad():
        assert pipe(x).shape == (7, 8)
        assert not pipe(x, target=y).requires_grad
    assert all(parameter.grad is None for parameter in pipe.parameters())


@pytest.mark.parametrize(
    ("options", "message"),
    [({}, "without a target the pipe returns the output"), ({"target": 1}, "there is no output to return")],
)
def test_an_output_that_is_not_there_cannot_be_returned(options: dict[str, Any], message: str) -> None:
    pipe = Pipe(layers(), 2, balance=[2, 2], devices=["cpu"] * 2)
    with pytest.raises(ValueError, match=message):
        pipe(torch.randn(4, 4), return_output=True, **options)


def test_a_pipe_without_layers_has_no_loss() -> None:
    with pytest.raises(ValueError, match="without layers has no loss"):
        Pipe(nn.Sequential(), loss_fn=F.mse_loss)(torch.ones(2), target=torch.ones(2))


# A last layer that returns the loss


class LastLayer(nn.Linear):
    """A loss with parameters."""

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(super().forward(F.dropout(x, 0.2, self.training)), target)


class LastLayerOfTwo(nn.Module):
    """Takes a tuple apart, and the target after it."""

    def __init__(self) -> None:
        super().__init__()
        self.bilinear = nn.Bilinear(8, 8, 3)

    def forward(self, x: Tensor, y: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(self.bilinear(x, y), target)


class LastLayerOfPair(LastLayerOfTwo):
    """Takes a tuple whole, and the target after it."""

    def forward(self, pair: tuple[Tensor, Tensor], target: Tensor) -> Tensor:
        return super().forward(*pair, target)


class Two(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x, x * 2


@inside
@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.Sequential(*layers()[:3], LastLayer(8, 3)),
        lambda: PipeSequential(*layers()[:2], Two(), LastLayerOfTwo()),
        lambda: nn.Sequential(*layers()[:2], Two(), LastLayerOfPair()),
    ],
)
def test_the_last_layer_may_return_the_loss(way: Any, make: Callable[[], nn.Sequential], checkpoint: str) -> None:
    plain = make()
    x, y = torch.randn(7, 4), torch.randint(3, (7,))
    for balance in ([4], [1, 3], [1, 1, 1, 1]):
        plain.zero_grad()
        pipe = way.pipe(plain, 3, checkpoint, balance=balance, loss_fn=None)
        torch.manual_seed(1)
        key = int(torch.empty((), dtype=torch.int64).random_())
        reference = reference_step(plain, x, y, None, 3, key)
        torch.manual_seed(1)
        same_step(pipe, plain, reference, x, target=y)


def test_a_last_layer_that_is_the_only_one_takes_inputs_and_target() -> None:
    layer = LastLayerOfTwo()
    pipe = Pipe(nn.Sequential(copy.deepcopy(layer)), 3, balance=[1], devices=["cpu"], schedule="1f1b")
    x, y, target = torch.randn(7, 8), torch.randn(7, 8), torch.randint(3, (7,))
    reference = reference_step(nn.Sequential(layer), (x, y), target, None, 3, key=0)
    same_step(pipe, nn.Sequential(layer), reference, x, y, target=target)


# Reductions and weights


def masked(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output, target, ignore_index=-100)


def counted(target: Tensor) -> Tensor:
    return (target != -100).sum()


def assert_as_whole(way: Any, y: Tensor, loss_fn: Any, checkpoint: str = "except_last", **options: Any) -> None:
    """The bits of micro-batches one after the other, and nearly the loss and the gradients of the whole batch."""
    plain, x = layers().double(), torch.randn(len(y), 4, dtype=torch.float64)
    pipe = way.pipe(plain, 3, checkpoint, balance=[1, 1, 1, 1], loss_fn=loss_fn, **options)
    reference = reference_step(plain, x, y, loss_fn, 3, key=0, **options)
    loss = same_step(pipe, plain, reference, x, target=y)
    plain.zero_grad()
    whole = loss_fn(plain(x), y)
    whole.backward()
    torch.testing.assert_close(loss, whole, rtol=1e-12, atol=0)
    for a, e in zip(pipe.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(a.grad, e.grad, rtol=1e-12, atol=1e-15)


@inside
@pytest.mark.parametrize("rows", [8, 7, 2])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_a_mean_or_a_sum_is_that_of_the_whole_batch_however_it_is_cut(way: Any, reduction: str, rows: int) -> None:
    loss_fn = partial(F.cross_entropy, reduction=reduction)
    assert_as_whole(way, torch.randint(3, (rows,)), loss_fn, loss_reduction=reduction)


@inside
@pytest.mark.parametrize("hidden", [[0], [0, 1, 2], [3, 6], [2, 3, 4, 5, 6]], ids=str)
def test_weights_count_what_is_counted(way: Any, checkpoint: str, hidden: list[int]) -> None:
    """Of micro-batches of three, two and two rows, some rows or all of some are masked."""
    y = torch.randint(3, (7,))
    y[hidden] = -100
    assert_as_whole(way, y, masked, checkpoint, loss_weight=counted)


@inside
@pytest.mark.parametrize(("loss_fn", "hidden"), [(masked, False), (F.cross_entropy, True)])
def test_a_mean_of_nothing_is_not_a_number(way: Any, loss_fn: Any, hidden: bool) -> None:
    """Masked rows get zeros for a gradient, those that weigh nothing NaN, as in a plain mean."""
    plain = layers()
    pipe = way.pipe(plain, 3, balance=[1, 1, 1, 1], loss_fn=loss_fn, loss_weight=lambda target: target.sum() * 0)
    x, y = torch.randn(7, 4), torch.full((7,), 0 if hidden else -100)
    loss = pipe(x, target=y)
    assert loss.isnan()
    loss.backward()
    expected = plain(x)
    (masked(expected, y) if not hidden else expected.mean() * math.nan).backward()
    for a, e in zip(pipe.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(a.grad, e.grad, equal_nan=True)


def test_an_empty_batch_is_a_mean_of_nothing(way: Any) -> None:
    pipe = way.pipe(layers(), 3, balance=[1, 1, 1, 1])
    loss = way.loss(pipe, torch.empty(0, 4), torch.empty(0))
    assert loss.isnan()
    loss.backward()
    plain = layers()
    (plain(torch.empty(0, 4)).flatten(1) - torch.empty(0)[:, None]).square().mean().backward()
    assert same_gradients(pipe, plain)


# Padding that the mean does not leave out


def own(output: Tensor, target: Any) -> Tensor:
    return F.cross_entropy(output, target["y"] if isinstance(target, dict) else target)


class OwnModule(nn.CrossEntropyLoss):
    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        return super().forward(output, target)


def padded(ignored: int = -100) -> Tensor:
    target = torch.ones(8, dtype=torch.long)
    target[0] = ignored
    return target


@pytest.mark.parametrize(("loss_fn", "ignored"), [(own, -100), (OwnModule(ignore_index=0), 0)])
def test_padding_that_is_not_left_out_is_told_once_at_the_callers_line(loss_fn: Any, ignored: int) -> None:
    pipe = Pipe(layers(), 4, loss_fn=loss_fn, balance=[2, 2], devices=["cpu"] * 2)
    x = torch.randn(8, 4)
    pipe(x, target=torch.full((8,), 1))
    with pytest.warns(PipeWarning, match=rf"loss_weight=lambda target: \(target != {ignored}\)\.sum\(\)") as seen:
        pipe(x, target=padded(ignored))
    assert [each.filename for each in seen] == [__file__]
    pipe(x, target=padded(ignored))


def test_padding_is_unequal_by_the_rows_of_each_micro_batch() -> None:
    equal = [((torch.tensor([1, -100]),), None), ((torch.tensor([-100, 2]),), None)]
    assert LossSettings(own).padding_warning(equal, [2, 2]) is None
    assert LossSettings(own).padding_warning([*equal, ((torch.tensor([1]),), None)], [2, 2, 1]) is not None


def test_targets_with_other_numbers_of_tensors() -> None:
    pipe = Pipe(layers(), 2, loss_fn=own, balance=[2, 2], devices=["cpu"] * 2)
    parts, labels = [torch.randn(2, 4), torch.randn(3, 4)], [torch.tensor([1, 2]), torch.tensor([0, 1, 2])]
    targets = MicroBatches([{"y": labels[0], "z": NoChunk(torch.ones(1))}, {"y": labels[1]}])
    loss = pipe(MicroBatches(parts), target=targets)
    torch.testing.assert_close(loss, F.cross_entropy(nn.Sequential(*pipe)(torch.cat(parts)), torch.cat(labels)))


# What is known of functions


class Focal(nn.Module):
    def __init__(self, gamma: float, rank: int = 0) -> None:
        super().__init__()
        self.gamma = gamma
        self.rank = rank
        self.began = object()

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        return (output - target).abs().pow(self.gamma).mean()


def compiled(function: Callable[..., Any]) -> Any:
    return torch.compile(function, backend="eager")


def plain(output: Tensor, target: Tensor, scale: float = 1.0) -> Tensor:
    return (output - target).mean() * scale


ALIKE: dict[str, Callable[[int], Any]] = {
    "nothing": lambda rank: None,
    "a module of PyTorch": lambda rank: nn.CrossEntropyLoss(torch.ones(3), label_smoothing=0.1).train(rank == 0),
    "a lambda": lambda rank: lambda output, target: (output - target).abs().mean(),
    "a partial": lambda rank: partial(plain, scale=2.0, device=f"cuda:{rank}", rank=rank),
    "a module of one's own": lambda rank: Focal(2.0, rank),
    "compiled on one rank": lambda rank: compiled(plain) if rank else plain,
    "scripted": lambda rank: torch.jit.script(nn.MSELoss()),
}
OTHERS: list[tuple[Any, Any]] = [
    (None, F.mse_loss),
    (nn.MSELoss(), nn.L1Loss()),
    (nn.CrossEntropyLoss(label_smoothing=0.1), nn.CrossEntropyLoss()),
    (nn.CrossEntropyLoss(ignore_index=0), nn.CrossEntropyLoss()),
    (nn.MSELoss(reduction="sum"), nn.MSELoss()),
    (partial(F.cross_entropy, ignore_index=0), F.cross_entropy),
    (partial(plain, scale=1.0), partial(plain, scale=2.0)),
    (Focal(1.0), Focal(2.0)),
]


def test_the_same_function_is_told_alike_and_others_are_told_apart() -> None:
    for kind, make in ALIKE.items():
        assert function_identity(make(0)) == function_identity(make(1)), kind
    for one, other in OTHERS:
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
    "weights in a partial": partial(F.cross_entropy, weight=WEIGHT, ignore_index=1),
    "subclass": Subclass(ignore_index=3),
    "smoothed": partial(F.cross_entropy, label_smoothing=0.1),
}


def padded_batch() -> tuple[Tensor, Tensor]:
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
    x, y = padded_batch()
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
    x, y = padded_batch()
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


INNER = partial(F.cross_entropy, ignore_index=3)


@pytest.mark.parametrize(
    ("loss_fn", "counted"),
    [
        (None, None),
        (F.mse_loss, None),
        (partial(F.cross_entropy, torch.ones(1)), None),
        (nn.CrossEntropyLoss(ignore_index=3), CountedTargets(3)),
        (nn.NLLLoss(ignore_index=3), CountedTargets(3)),
        (Subclass(ignore_index=3), CountedTargets(3)),
        (Own(ignore_index=3), None),
        (F.cross_entropy, CountedTargets()),
        (INNER, CountedTargets(3)),
        (partial(compiled(F.cross_entropy), ignore_index=3), CountedTargets(3)),
        (partial(compiled(INNER), ignore_index=1), CountedTargets(1)),
        (wrapping, None),
    ],
)
def test_which_targets_a_function_counts(loss_fn: Any, counted: CountedTargets | None) -> None:
    assert CountedTargets.of(loss_fn) == counted
    if loss_fn is not None:
        assert CountedTargets.of(compiled(loss_fn)) == counted
        assert unwrapped(compiled(loss_fn))[0] is unwrapped(loss_fn)[0]


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
