"""The parts are compared with the model on the sample."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipework import attach
from pipework.model.parts.check import check_parts
from pipework.model.parts.cut import Cuttable
from tests.model.parts.models import WIDTH

X = torch.randn(2, WIDTH)


class Net(nn.Module):
    """Returns something else where its first layer is in another part."""

    def __init__(self, other: Any = None) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Dropout(0.5), nn.Linear(4, 4)])
        self.layers[3] = nn.Linear(WIDTH, WIDTH)
        self.other = [other]

    def forward(self, x: Tensor) -> Any:
        for layer in self.layers:
            x = layer(x)
        here = type(self.layers[0]) is nn.Linear
        return x if here or self.other[0] is None else self.other[0](x)


def compare(model: nn.Module) -> None:
    cuttable = Cuttable(model, X, blocks=None)
    check_parts(cuttable, cuttable.sequential())


def test_nothing_changes() -> None:
    model = Net()
    model.layers[0].eval()
    flags = [each.training for each in model.modules()]
    buffers = [each.clone() for each in model.buffers()]
    state = torch.get_rng_state()
    compare(model)
    assert [each.training for each in model.modules()] == flags
    assert all(map(torch.equal, model.buffers(), buffers))
    assert torch.equal(torch.get_rng_state(), state)
    assert all(each.grad is None for each in model.parameters())


@pytest.mark.parametrize(
    ("other", "where"),
    [(lambda x: x + 1, "differs by up to"), (lambda x: x[:1], ""), (lambda x: x.double(), ""), (lambda x: [x], "")],
    ids=["values", "shape", "dtype", "nesting"],
)
def test_a_difference_is_named(other: Any, where: str) -> None:
    with pytest.raises(ValueError, match=f"parts of Net give another result than the model itself .*{where}"):
        compare(Net(other))


def test_a_model_without_values_is_not_compared() -> None:
    with torch.device("meta"):
        model = Net(lambda x: x + 1)
    compare(model)


class Merges(nn.Linear):
    """Adds its adapter to its weight for evaluation, and takes it away again."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.adapter = nn.Parameter(torch.ones(4, 4))
        self.merged = False

    def train(self, mode: bool = True) -> "Merges":
        if mode == self.merged:
            self.merged = not mode
            with torch.no_grad():
                self.weight += self.adapter if self.merged else -self.adapter
        return super().train(mode)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) if self.merged else nn.functional.linear(x, self.weight + self.adapter, self.bias)


class Merging(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Merges() for _ in range(2))

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return nn.functional.mse_loss(x, labels)


@pytest.mark.parametrize("training", [True, False])
def test_adapters_stay_as_they_are(training: bool) -> None:
    model, x = Merging().train(training), torch.randn(6, 4)
    before = [layer.weight.clone() for layer in model.layers]
    attach(model, {"x": x, "labels": x}, chunks=2, devices=["cpu"] * 2)
    assert all(layer.merged is not training for layer in model.layers)
    assert all(torch.equal(layer.weight, weight) for layer, weight in zip(model.layers, before, strict=True))
