"""Values are the CPU's, bit for bit; optimizers, autocast and gradient scaling work; errors surface."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from tests.accelerator import simulated
from tests.accelerator.gate import fail

pytestmark = pytest.mark.gpu

WIDTH = 8


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.project = nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x):
        heads = [part.unflatten(-1, (2, -1)).transpose(1, 2) for part in self.project(x).chunk(3, -1)]
        # The CPU's own choice, flash attention, has no counterpart on other devices.
        with sdpa_kernel(SDPBackend.MATH):
            return F.scaled_dot_product_attention(*heads, is_causal=True)


class CrossEntropy(nn.Linear):
    def forward(self, x):
        scores = super().forward(x).flatten(0, 1)
        target = torch.arange(len(scores), device=x.device) % WIDTH
        return F.cross_entropy(scores, target.masked_fill(target == 1, -100))


SEQUENCE, IMAGES = (4, 5, WIDTH), (2, 3, 9, 9)
LAYERS = {
    "Linear": (lambda: nn.Linear(WIDTH, 5), SEQUENCE),
    "LayerNorm": (lambda: nn.LayerNorm(WIDTH), SEQUENCE),
    "GroupNorm": (lambda: nn.GroupNorm(3, 3), IMAGES),
    "BatchNorm2d": (lambda: nn.BatchNorm2d(3), IMAGES),
    "GELU": (nn.GELU, SEQUENCE),
    "Softmax": (lambda: nn.Softmax(-1), SEQUENCE),
    "Conv1d": (lambda: nn.Conv1d(5, 2, 3), SEQUENCE),
    "Conv2d": (lambda: nn.Conv2d(3, 4, 3, stride=2, padding=1), IMAGES),
    "ConvTranspose2d": (lambda: nn.ConvTranspose2d(3, 4, 3), IMAGES),
    "MaxPool2d": (lambda: nn.MaxPool2d(2), IMAGES),
    "Embedding": (lambda: nn.Embedding(10, WIDTH), None),
    "attention": (Attention, SEQUENCE),
    "cross_entropy": (lambda: CrossEntropy(WIDTH, WIDTH), SEQUENCE),
}


def results(module, x):
    """The output and all gradients, on the CPU."""
    x = x.detach().requires_grad_(x.is_floating_point())
    output = module(x)
    output.square().sum().backward()
    gradients = [leaf.grad for leaf in (x, *module.parameters()) if leaf.requires_grad]
    return [each.detach().cpu() for each in (output, *gradients, *module.buffers())]


@pytest.mark.parametrize("name", LAYERS)
def test_values_are_the_cpus_bit_for_bit(name):
    make, shape = LAYERS[name]
    module = make()
    x = torch.randint(10, (4, 5)) if shape is None else torch.randn(shape)
    other = copy.deepcopy(module).to("sim:1")
    for expected, actual in zip(results(module, x), results(other, x.to("sim:1")), strict=True):
        assert torch.equal(actual, expected)


# On the CPU these multiply all time steps at once, on other devices step by step.


def test_an_error_in_a_kernel_surfaces_at_the_next_wait():
    x = torch.zeros(4, device="sim")
    fail(x)
    y = x + 1
    with pytest.raises(RuntimeError, match=r"ran asynchronously on the simulated accelerator failed.*always fails"):
        torch.accelerator.synchronize()
    assert y.tolist() == [1] * 4  # and the device is still there


def test_an_index_out_of_range_surfaces_at_the_next_wait():
    layer = nn.Embedding(4, 2, device="sim")
    looked_up = layer(torch.tensor([9], device="sim"))
    with pytest.raises(RuntimeError, match="index out of range"):
        looked_up.sum().item()
    simulated.poison_reads()  # of the sum
