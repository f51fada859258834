"""Layers whose annotations name what is there for type checkers only."""

import copy
import sys
from typing import Any

import pytest
import torch
from torch import nn

from pipework import Pipe, attach

pytestmark = pytest.mark.skipif(sys.version_info < (3, 14), reason="Python computes annotations at once before 3.14")

LAYERS = """
class Scaled(nn.Module):
    def __init__(self, width: Width = 4) -> Missing:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def reset_parameters(self, gain: Gain = 2.0) -> Missing:
        nn.init.constant_(self.weight, gain)

    def forward(self, x: Rows, scale: torch.Missing | Missing) -> tuple[Rows, "Missing"]:
        return x * self.weight, scale

class Joined(nn.Module):
    def forward(self, pair: Pair[Rows]) -> Rows:
        return pair[0] + pair[1]

class Distance:
    def __call__(self, output: Rows, target: Rows) -> Loss:
        return (output - target).square().mean()

class Whole(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: Rows, labels: Labels = None) -> Missing:
        for layer in self.layers:
            x = layer(x)
        return x if labels is None else {"loss": (x - labels).square().mean(), "x": x}
"""


@pytest.fixture
def names() -> dict[str, Any]:
    defined: dict[str, Any] = {"nn": nn, "torch": torch, "__name__": __name__}
    exec(compile(LAYERS, __file__, "exec", dont_inherit=True), defined)
    return defined


def test_layers_and_a_loss(names: dict[str, Any]) -> None:
    module = nn.Sequential(names["Scaled"](), names["Joined"](), nn.Linear(4, 4))
    plain = copy.deepcopy(module)
    loss_fn, batch, target = names["Distance"](), (torch.randn(4, 4), torch.randn(4, 4)), torch.randn(4, 4)
    pipe = Pipe(module, 2, balance=[1, 2], devices=["cpu"] * 2, loss_fn=loss_fn)
    loss = pipe(*batch, target=target)
    loss.backward()
    expected = loss_fn(plain[2](plain[1](plain[0](*batch))), target)
    expected.backward()
    torch.testing.assert_close(loss, expected)
    for actual, wanted in zip(pipe.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(actual.grad, wanted.grad)
    with pytest.raises(TypeError, match="targets"):
        pipe(*batch, targets=target)


def test_layers_without_memory(names: dict[str, Any]) -> None:
    with torch.device("meta"):
        module = nn.Sequential(names["Scaled"](), names["Joined"]())
    pipe = Pipe(module, 2, balance=[1, 1], devices=["cpu"] * 2)
    pipe(torch.ones(4, 4), torch.ones(4, 4))
    assert pipe[0].weight.tolist() == [2.0] * 4


def test_a_model_that_is_attached(names: dict[str, Any]) -> None:
    model, batch = names["Whole"](), {"x": torch.randn(4, 4), "labels": torch.randn(4, 4)}
    expected = model(**batch)["loss"]
    pipe = attach(model, batch, chunks=2, devices=["cpu", "cpu"])
    torch.testing.assert_close(model(**batch)["loss"], expected)
    assert len(pipe.devices) == 2
