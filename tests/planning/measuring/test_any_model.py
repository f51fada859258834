"""Models that are no layers are profiled, planned and attached by the same calls."""

import time
from typing import Any

import pytest
import torch
from torch import nn

from pipework import MicroBatches, attach, plan
from pipework.planning import Rates, profile
from pipework.planning.measuring.any_model import as_layers
from tests.integrations import test_splits as of_images
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


@pytest.mark.thorough
def test_a_batch_with_images_of_its_rows_is_planned_as_attach_cuts_it() -> None:
    family = of_images.CASES["gemma3"]
    model, batch = of_images.model_of(family), of_images.batch_of(family, [0, 1, 2, 3])
    found = plan(model, batch, workers=2, schedules=["1f1b"], chunks=2, iterations=4, timeout=0)
    assert (found.batch, found.chunks) == (4, 2)
    attach(model, batch, plan=found)
    loss_in(model(**batch)).backward()


def test_micro_batches_of_the_caller_give_their_number() -> None:
    layers = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    x = MicroBatches([torch.zeros(rows, 4) for rows in (3, 1, 2)])
    options: dict[str, Any] = {
        "target": x,
        "loss_fn": nn.functional.mse_loss,
        "workers": 2,
        "schedules": ["1f1b"],
        "iterations": 2,
    }
    found = plan(layers, x, timeout=0, **options)
    assert (found.chunks, found.batch) == (3, 6)
    with pytest.raises(ValueError, match="the sample has 3 micro-batches: leave chunks= out"):
        plan(layers, x, chunks=2, **options)


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
