"""Modules with random forwards, cut at random: bitwise as without a pipe."""

import copy

import pytest
import torch
from torch import Tensor, nn

from pipework import attach
from pipework.model.parts.cut import Cuttable
from tests.model.parts.harness import loss_in, plain_step
from tests.model.parts.random_modules import RandomModule, batch_for, settings_for

SEEDS = [
    *range(8),
    *(pytest.param(seed, marks=pytest.mark.thorough) for seed in range(8, 36)),
    *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(36, 1000)),
]


@pytest.mark.parametrize("seed", SEEDS)
def test_a_random_module(seed: int) -> None:
    torch.manual_seed(seed)
    model = RandomModule(seed).double()
    batch = batch_for(model, seed)
    sample = batch_for(model, seed + 1)  # its arguments are in another order
    sample = {name: value[:4] if isinstance(value, Tensor) else value for name, value in sample.items()}
    groups = len(Cuttable(model, sample, blocks=None).groups)
    settings = settings_for(groups, seed)
    plain = copy.deepcopy(model)
    pipe = attach(model, sample, **settings)
    torch.manual_seed(seed)
    loss = loss_in(model(**batch))
    loss.backward()
    if model.draws:  # numbers do not depend on the cut, so that one part draws those of several
        attach(plain, sample, **{**settings, "balance": [groups], "devices": ["cpu"], "schedule": "gpipe"})
        torch.manual_seed(seed)
        expected = loss_in(plain(**batch))
        expected.backward()
    else:
        expected = plain_step(plain, batch, pipe.chunks)
    assert torch.equal(loss.detach(), expected.detach()), (loss, expected)
    assert_near(model, plain, 1e-12 if model.rounds else 0.0)


def assert_near(actual: nn.Module, expected: nn.Module, tolerance: float) -> None:
    """Gradients and buffers differ by no more than a share of the largest one."""
    others = {**dict(actual.named_parameters()), **dict(actual.named_buffers())}
    pairs = {
        name: [each.grad if isinstance(each, nn.Parameter) else each for each in (tensor, others[name])]
        for name, tensor in (*expected.named_parameters(), *expected.named_buffers())
    }
    largest = max(float(tensor.abs().max()) for tensor, _ in pairs.values() if tensor is not None)
    for name, (tensor, other) in pairs.items():
        assert (tensor is None) == (other is None), name
        if tensor is not None:
            assert not other.isnan().any(), name
            assert float((tensor - other).abs().max()) <= tolerance * largest, f"{name}: {tensor} {other}"
