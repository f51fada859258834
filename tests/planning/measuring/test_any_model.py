"""Models that are no layers are profiled, planned and attached by the same calls."""

import time
from typing import Any

import pytest
import torch
from torch import nn

from pipework import attach, plan
from pipework.planning import Rates, profile
from pipework.planning.measuring.any_model import as_layers
from tests.integrations.tiny import llama
from tests.model.parts.harness import loss_in
from tests.model.parts.models import UNet, Vision, batch_of


@pytest.mark.parametrize("kind", [UNet, Vision])
def test_a_plan_of_a_model_is_one_for_attach(kind: type[nn.Module]) -> None:
    model, batch = kind(), batch_of(kind)
    found = plan(model, batch, workers=2, memory="1GiB", chunks=2, iterations=4, timeout=0)
    assert found.devices == ("cpu", "cpu")
    assert found.layers[0].name.partition(" .. ")[0] in dict(model.named_modules())
    assert "memory is that of each device: cpu has 1 GiB for 2 workers" in str(found)
    attach(model, batch, plan=found)
    loss_in(model(**batch)).backward()


def test_a_model_of_transformers_on_the_meta_device_is_profiled_by_rates() -> None:
    with torch.device("meta"):
        model = llama()
    ids = torch.randint(9, (4, 6))
    found = profile(model, {"input_ids": ids, "labels": ids}, rates=Rates(1e9, 1e9), workers=2)
    assert found.loss_inside
    assert found.layers[1].name == "model.layers.0"


def test_a_plan_is_found_in_about_its_seconds() -> None:
    class Slow(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            time.sleep(0.002)
            return super().forward(x)

    layers = nn.Sequential(*(Slow(4, 4) for _ in range(8)))
    x = torch.zeros(32, 4)
    begin = time.perf_counter()
    plan(layers, x, target=x, loss_fn=nn.functional.mse_loss, workers=2, seconds=0.5)
    assert time.perf_counter() - begin < 5


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: profile(nn.Sequential(nn.Linear(4, 4)), torch.zeros(2, 4), devices=["meta"]), "give rates="),
        (lambda: plan(nn.Linear(4, 4), torch.zeros(2, 4)), "could be cut"),
        (lambda: plan(Vision(), batch_of(Vision), target="wanted"), r"no 'wanted' \(it has 'pixels', 'labels'\)"),
        (lambda: plan(Vision(), batch_of(Vision), devices=["cpu"], workers=2), "workers is 2, and there are 1 devices"),
        (lambda: as_layers(3, None, None, None, None), "got int"),
    ],
)
def test_wrong_uses_are_refused(call: Any, text: str) -> None:
    with pytest.raises((ValueError, TypeError), match=text):
        call()
