"""The random numbers that a model draws for one micro-batch."""

import torch
from torch import Tensor, nn

from pipework.testing import micro_batch_random


def outputs(model: nn.Sequential, key: int, micro_batch: int) -> Tensor:
    with micro_batch_random(model, key, micro_batch):
        output: Tensor = model(torch.ones(2, 64))
    return output


def test_key_and_micro_batch_determine_the_numbers() -> None:
    model = nn.Sequential(nn.Dropout(0.5), nn.Dropout(0.5))
    first = outputs(model, 1, 0)
    assert torch.equal(outputs(model, 1, 0), first)
    assert not torch.equal(outputs(model, 1, 1), first)
    assert not torch.equal(outputs(model, 2, 0), first)


def test_a_layer_at_two_places_draws_twice() -> None:
    dropout = nn.Dropout(0.5)
    twice = outputs(nn.Sequential(dropout, dropout), 1, 0)
    assert torch.equal(twice, outputs(nn.Sequential(nn.Dropout(0.5), nn.Dropout(0.5)), 1, 0))
    assert not torch.equal(2 * outputs(nn.Sequential(dropout), 1, 0), twice)


def test_the_generator_and_the_hooks_are_as_before() -> None:
    model = nn.Sequential(nn.Linear(64, 2), nn.Dropout(0.5))
    before = torch.get_rng_state()
    outputs(model, 1, 0)
    assert torch.equal(torch.get_rng_state(), before)
    assert not any(layer._forward_hooks or layer._forward_pre_hooks for layer in model)
