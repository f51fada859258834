"""Batch norms whose statistics are those of the whole mini-batch, in parts; a unit may itself be one."""

import copy
from typing import Any

import pytest
import torch
from torch import nn

from pipework import Pipe, convert_deferred_batch_norm, to_sequential
from pipework.model.batchnorm import DeferredBatchNorm
from tests.model.parts.harness import assert_same, attached, loss_in, micro_batches, plain_step
from tests.model.parts.models import ResNet, batch_of


def statistics(model: nn.Module) -> dict[str, Any]:
    return {name: buffer for name, buffer in model.named_buffers() if "running" in name or "tracked" in name}


@pytest.mark.parametrize("checkpoint", ["always", "never"])
def test_attached(checkpoint: str) -> None:
    model, batch = ResNet(), batch_of(ResNet)
    plain = convert_deferred_batch_norm(copy.deepcopy(model), 4)
    names = list(model.state_dict())
    attached(model, batch, chunks=4, balance=[4, 3], deferred_batch_norm=True, checkpoint=checkpoint)
    assert list(model.state_dict()) == names
    for _ in range(2):
        loss, expected = loss_in(model(**batch)), plain_step(plain, batch, 4)
        loss.backward()
        assert torch.equal(loss.detach(), expected)
        assert_same(model, plain)


def test_layers_made_by_hand() -> None:
    model, batch = ResNet(), {"x": batch_of(ResNet)["x"]}
    plain = convert_deferred_batch_norm(copy.deepcopy(model), 4)
    layers = to_sequential(model, batch)
    pipe = Pipe(layers, chunks=4, balance=[4, 3], devices=["cpu"] * 2, deferred_batch_norm=True)
    output = pipe(**batch)
    pieces = [plain(**piece) for piece in micro_batches(batch, 4)]
    assert torch.equal(output, torch.cat(pieces))
    assert len(statistics(plain)) == 30
    for name, expected in statistics(plain).items():
        assert torch.equal(statistics(model)[name], expected), name
        assert name not in statistics(pipe) or torch.equal(statistics(pipe)[name], expected), name
    units = [unit for part in pipe for unit in part.units_here().values()]
    assert sum(isinstance(unit, DeferredBatchNorm) for unit in units) == 1
    assert [name for part in pipe for name in part.units_here()] == list(dict.fromkeys(_units(model, batch)))


def _units(model: nn.Module, batch: dict[str, Any]) -> list[str]:
    return [name for part in to_sequential(model, batch) for name in part.units_here()]
