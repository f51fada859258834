"""What a forward draws between its units is drawn again in each part: the same numbers for any cut."""

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pipework import Pipe
from pipework.attached import to_sequential
from pipework.testing import draw_key, micro_batch_random


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


def trained(model: nn.Module, sizes: list[int], balance: list[int], checkpoint: str = "except_last") -> list[Tensor]:
    layers = to_sequential(model, torch.ones(2, 4), balance=sizes)
    pipe = Pipe(layers, chunks=3, checkpoint=checkpoint, balance=balance, devices=["cpu"] * len(balance))
    torch.manual_seed(5)
    output = pipe(torch.ones(6, 4))
    output.sum().backward()
    return [output.detach(), *(parameter.grad for parameter in model.parameters())]


@pytest.mark.parametrize("trains_first", [True, False])
@pytest.mark.parametrize("checkpoint", ["always", "never"])
def test_numbers_do_not_depend_on_the_cut(trains_first, checkpoint) -> None:
    model = Net().train(trains_first)  # a model that was read from files is in evaluation mode when it is cut
    units = len(to_sequential(model, torch.ones(2, 4)))
    models = [copy.deepcopy(model) for _ in range(4)]
    cuts = [([1] * units, [1, units - 1]), ([1] * units, [units - 1, 1]), ([units - 1, 1], [1, 1]), ([units], [1])]
    results = []
    for each, (sizes, balance) in zip(models, cuts, strict=True):
        each.train()
        results.append(trained(each, sizes, balance, checkpoint))
    for other in results[1:]:
        for one, two in zip(results[0], other, strict=True):
            assert torch.equal(one, two)


def test_the_reference_draws_the_same() -> None:
    model = Net()
    output = trained(copy.deepcopy(model), [1, 3], [1, 1])[0]
    layers = to_sequential(model, torch.ones(2, 4))
    torch.manual_seed(5)
    key = draw_key()
    for number in range(3):
        with micro_batch_random(layers, key, number):
            assert torch.equal(layers(torch.ones(2, 4)), output[2 * number : 2 * number + 2])
