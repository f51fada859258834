"""Random layers, in which parameters are used again and again in many ways, give autograd's bits."""

import random
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from tests.autograd.weight_split.harness import plainly, same, split

Use = Callable[[Tensor, Tensor, Tensor], Tensor]  # of a value, a weight and a bias


def hooked(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    y = F.linear(x, weight)
    if y.requires_grad:
        y.register_hook(lambda gradient: gradient * 2)
    return y


USES: dict[str, Use] = {
    "linear": lambda x, w, b: F.linear(x, w),
    "with a bias": F.linear,
    "of several rows": lambda x, w, b: F.linear(torch.stack([x, x.sin()]), w, b).sum(0),
    "matmul": lambda x, w, b: x @ w,
    "addmm": lambda x, w, b: torch.addmm(b, x, w),
    "einsum": lambda x, w, b: torch.einsum("bi,ij->bj", x, w),
    "embedding": lambda x, w, b: F.embedding((x.detach()[:, 0].abs() * 100).long() % 7, w),
    "overwritten": lambda x, w, b: F.linear(x, w).relu_(),
    "hooked": hooked,
    "checkpointed": lambda x, w, b: checkpoint(lambda y: F.linear(y, w, b).tanh(), x, use_reentrant=False),
    "none": lambda x, w, b: x.tanh(),
}


def random_layer(chooser: random.Random) -> Callable[..., Tensor]:
    """Each step takes any value of before, and either weight; three values leave the layer."""
    steps = [
        (USES[chooser.choice(list(USES))], chooser.random(), chooser.random(), chooser.randrange(2))
        for _ in range(chooser.randint(2, 8))
    ]

    def layer(first: Tensor, second: Tensor, bias: Tensor, x: Tensor) -> Tensor:
        values = [x]
        for use, which, other, weight in steps:
            y = use(values[int(which * len(values))], (first, second)[weight], bias)
            values.append(y + values[int(other * len(values))] * 0.5)
        return torch.stack(values[-3:]).sum(0)

    return layer


@pytest.mark.parametrize("number", range(100))
def test_random_layers(number: int) -> None:
    chooser = random.Random(number)
    layer, grad = random_layer(chooser), chooser.random() < 0.5
    dtype = chooser.choice([torch.float32, torch.float64, torch.bfloat16])
    parameters = [(0.3 * torch.randn(*shape)).to(dtype).requires_grad_() for shape in ((7, 7), (7, 7), (7,))]
    batches = [[torch.randn(9, 7).to(dtype).requires_grad_(grad)] for _ in range(3)]
    expected, actual = plainly(layer, parameters, batches), split(layer, parameters, batches)
    same(actual.outputs, expected.outputs)
    same(actual.of_inputs, expected.of_inputs)
    same(actual.of_parameters, expected.of_parameters)
    assert False not in actual.waits
