"""Batch norms whose statistics are those of the whole mini-batch, in parts; a unit may itself be one."""

import copy

import pytest
import torch

from pipework import convert_deferred_batch_norm
from tests.model.parts.harness import assert_same, attached, loss_in, plain_step
from tests.model.parts.models import ResNet, batch_of


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
