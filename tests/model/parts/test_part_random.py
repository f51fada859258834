"""Modules with random forwards, cut at random, are bitwise as without a pipe; random numbers are those of any cut."""

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pipework import Pipe, attach
from pipework.attached import to_sequential
from pipework.model.parts.cut import Cuttable
from pipework.testing import draw_key, micro_batch_random
from tests.model.parts.harness import loss_in, plain_step
from tests.model.parts.random_modules import RandomModule, batch_for, settings_for
from tests.tiers import one_quick

SEEDS = [
    *one_quick(range(12)),
    *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(12, 1000)),
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


class Net(nn.Module):
    """A residual stream with dropout as a function, a module, and in a block."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(4, 4)
        self.dropout = nn.Dropout(0.5)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = F.dropout(self.embed(F.dropout(x, 0.5, self.training)), 0.5, self.training)
        for block in self.blocks:
            x = x + self.dropout(F.dropout(block(x), 0.5, self.training))
        return x


def trained(model: nn.Module, sizes: list[int], balance: list[int], checkpoint: str) -> list[Tensor]:
    layers = to_sequential(model, torch.ones(2, 4), balance=sizes)
    model.train()
    layers.train()
    pipe = Pipe(layers, chunks=3, checkpoint=checkpoint, balance=balance, devices=["cpu"] * len(balance))
    torch.manual_seed(5)
    output = pipe(torch.ones(6, 4))
    output.sum().backward()
    return [output.detach(), *(parameter.grad for parameter in model.parameters())]


@pytest.mark.parametrize("trains_first", [True, False])
@pytest.mark.parametrize("checkpoint", ["always", "never"])
def test_numbers_do_not_depend_on_the_cut(trains_first: bool, checkpoint: str) -> None:
    model = Net().train(trains_first)  # a model that was read from files is in evaluation mode when it is cut
    layers = to_sequential(copy.deepcopy(model).train(), torch.ones(2, 4))
    units = len(layers)
    cuts = [([1] * units, [1, units - 1]), ([1] * units, [units - 1, 1]), ([units - 1, 1], [1, 1]), ([units], [1])]
    results = [trained(copy.deepcopy(model), sizes, balance, checkpoint) for sizes, balance in cuts]
    for other in results[1:]:
        for one, two in zip(results[0], other, strict=True):
            assert torch.equal(one, two)
    torch.manual_seed(5)
    key = draw_key()
    for number, rows in enumerate(results[0][0].split(2)):
        with micro_batch_random(layers, key, number):
            assert torch.equal(layers(torch.ones(2, 4)), rows), "the reference draws the same"
