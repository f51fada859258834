import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from pipework import Pipe
from pipework.runtime.stage.returned import note_returned


class Nothing(nn.Linear):
    def forward(self, x: Tensor) -> None:  # type: ignore[override]
        super().forward(x)


class Wrapped(nn.Linear):
    def forward(self, x: Tensor) -> Any:
        return {"x": super().forward(x)}


class Detaching(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.detach()


def linear() -> nn.Module:
    return nn.Linear(4, 4)


def pipe_of(*layers: nn.Module, schedule: str = "1f1b", checkpoint: str = "except_last", **options: Any) -> Pipe:
    options = {"loss_fn": functional.mse_loss, **options}
    balance = [1, len(layers) - 1]
    return Pipe(
        nn.Sequential(*layers), 3, checkpoint, balance=balance, devices=["cpu"] * 2, schedule=schedule, **options
    )


LSTM = r"layer '{}' \(LSTM\) returned \(tensor, \(tensor, tensor\)\), which {} was given. A tuple .*its first item"
NOTHING = r"layer '{}' \(Nothing\) returned None, which {} was given. Its forward may lack a return"
WRAPPED = r"layer '{}' \(Wrapped\) returned {{'?x'?: tensor}}, which {} was given. Wrap layer '{}' \(Wrapped\) in a mod"


@pytest.mark.parametrize(
    ("make", "note"),
    [
        (lambda: [nn.LSTM(4, 4, batch_first=True), linear()], LSTM.format(0, r"layer '1' \(Linear\)")),  # on a stage
        (lambda: [linear(), nn.LSTM(4, 4, batch_first=True), linear()], LSTM.format(1, r"layer '2' \(Linear\)")),
        (lambda: [linear(), nn.LSTM(4, 4, batch_first=True)], LSTM.format(1, "loss_fn")),
        (lambda: [Nothing(4, 4), nn.LayerNorm(4)], NOTHING.format(0, r"layer '1' \(LayerNorm\)")),
        (lambda: [linear(), Nothing(4, 4), linear()], NOTHING.format(1, r"layer '2' \(Linear\)")),
        (lambda: [linear(), Nothing(4, 4)], NOTHING.format(1, "loss_fn")),
        (lambda: [Wrapped(4, 4), linear()], WRAPPED.format(0, r"layer '1' \(Linear\)", 0)),
    ],
)
def test_the_layer_that_returned_it_is_named(make: Callable[[], list[nn.Module]], note: str) -> None:
    x = torch.randn(6, 5, 4)
    with pytest.raises((TypeError, AttributeError)) as error:
        pipe_of(*make())(x, target=x)
    (returned,) = [each for each in error.value.__notes__ if " returned " in each]
    assert re.search(note, returned), returned


def test_inputs_of_the_pipe_and_tensors_are_no_layers_fault() -> None:
    error = TypeError("no")
    note_returned(error, None, None, "layer '0' (Linear)")
    note_returned(error, torch.ones(1), "layer '0' (Linear)", "layer '1' (Linear)")
    assert not hasattr(error, "__notes__")
    other = ArithmeticError("no")
    note_returned(other, None, "layer '0' (Linear)", "layer '1' (Linear)")
    assert not hasattr(other, "__notes__")


# Losses without a graph


def detached(output: Tensor, target: Tensor) -> Tensor:
    return functional.mse_loss(output, target).detach()


def accuracy(output: Tensor, target: Tensor) -> Tensor:
    return (output.argmax(-1) == target.argmax(-1)).float().mean()


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb-h1"])
@pytest.mark.parametrize("checkpoint", ["never", "always"])
@pytest.mark.parametrize("loss_fn", [detached, accuracy])
def test_a_loss_without_a_graph(schedule: str, checkpoint: str, loss_fn: Callable[..., Tensor]) -> None:
    pipe = pipe_of(linear(), linear(), schedule=schedule, checkpoint=checkpoint, loss_fn=loss_fn)
    x = torch.randn(6, 4)
    with pytest.raises(RuntimeError, match=rf"^loss_fn \({loss_fn.__name__}\) returned a loss without a g"):
        pipe(x, target=x)
    with torch.no_grad():
        assert pipe(x, target=x) >= 0
    pipe.eval()
    assert pipe(x, target=x) >= 0


def test_an_output_without_a_graph() -> None:
    x = torch.randn(6, 4)
    with pytest.raises(RuntimeError, match=r"^layer '1' \(Detaching\) returned an output without a graph"):
        pipe_of(linear(), Detaching())(x, target=x)


class LossLayer(nn.Module):
    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return functional.mse_loss(x, target).detach()


def test_a_last_layer_without_a_graph() -> None:
    x = torch.randn(6, 4)
    with pytest.raises(RuntimeError, match=r"^layer '1' \(LossLayer\) returned a loss without a graph"):
        pipe_of(linear(), LossLayer(), loss_fn=None)(x, target=x)


@pytest.mark.filterwarnings("ignore:loss_fn .masked. is no mean over rows")  # which is true
def test_some_micro_batches_may_have_a_constant_loss() -> None:
    def masked(output: Tensor, target: Tensor) -> Tensor:
        return functional.mse_loss(output, target) if target.any() else output.new_zeros(())

    pipe, x, y = pipe_of(linear(), linear(), loss_fn=masked), torch.randn(6, 4), torch.zeros(6, 4)
    y[0] = 1
    pipe(x, target=y).backward()
    assert pipe[0].weight.grad.any()
    weighted = pipe_of(linear(), linear(), loss_fn=detached, loss_weight=torch.count_nonzero)
    with pytest.raises(RuntimeError, match="without a graph"):
        weighted(x, target=y)


def test_a_frozen_pipe_has_a_loss_all_the_same() -> None:
    pipe, x = pipe_of(linear(), linear()), torch.randn(6, 4)
    for parameter in pipe.parameters():
        parameter.requires_grad_(False)
    assert not pipe(x, target=x).requires_grad
