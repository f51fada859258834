"""Autocast around the call, in the model's own forward, and where the pipe is attached."""

import contextlib
import copy
from typing import Any

import pytest
import torch
from torch import nn

from tests.model.parts.harness import assert_same, attached, loss_in, micro_batches
from tests.model.parts.models import WIDTH, Block, batch_of, loss_of


def autocast(enabled: bool = True) -> Any:
    return torch.autocast("cpu", torch.bfloat16) if enabled else contextlib.nullcontext()


class Mixed(nn.Module):
    def __init__(self, inside: bool) -> None:
        super().__init__()
        self.inside = inside
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Any, labels: Any = None) -> Any:
        with autocast(self.inside):
            x = self.embed(x)
            for block in self.blocks:
                x = block(x)
            x = x @ x.new_ones(WIDTH, WIDTH)  # between units, in the type of autocast
        return loss_of(self.head(x if torch.is_autocast_enabled("cpu") else x.float()), labels)


SETTINGS = [
    {"checkpoint": "always"},
    {"schedule": "zb-h1"},
    pytest.param({"checkpoint": "never"}, marks=pytest.mark.slow),
    pytest.param({"schedule": "zb-v"}, marks=pytest.mark.slow),
]


@pytest.mark.parametrize("options", SETTINGS, ids=str)
@pytest.mark.parametrize("at_call", [False, True])
@pytest.mark.parametrize("at_attach", [False, True])
@pytest.mark.parametrize("inside", [False, True])
def test_it_is_that_of_the_model_itself(inside: bool, at_attach: bool, at_call: bool, options: dict[str, Any]) -> None:
    model, batch = Mixed(inside), batch_of(Mixed)
    plain, pieces = copy.deepcopy(model), micro_batches(batch, 4)
    balance = [1, 2, 2, 1] if options.get("schedule") == "zb-v" else [3, 3]
    with autocast(at_attach):
        attached(model, batch, chunks=4, balance=balance, **options)
    with autocast(at_call):
        loss = loss_in(model(**batch))
        losses = [loss_in(plain(**piece)) * 0.25 for piece in pieces]
    loss.backward()
    for each in losses:
        each.backward()
    total = losses[0].detach()
    for each in losses[1:]:
        total = total + each.detach()
    assert torch.equal(loss.detach(), total)
    assert_same(model, plain)
    model.eval()
    with torch.no_grad(), autocast(at_call):
        expected = torch.cat([plain(piece["x"]) for piece in pieces])
        output = model(batch["x"])
    assert output.dtype == expected.dtype
    assert torch.equal(output, expected)
