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


class Recurrent(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.layer = kind(WIDTH, WIDTH, num_layers=2, batch_first=True)

    def forward(self, x):
        return self.layer(x)[0]


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
@pytest.mark.parametrize("kind", [nn.RNN, nn.GRU, nn.LSTM])
def test_recurrent_layers_have_the_cpus_values(kind):
    module = Recurrent(kind).double()
    x = torch.randn(SEQUENCE, dtype=torch.float64)
    other = copy.deepcopy(module).to("sim:1")
    for expected, actual in zip(results(module, x), results(other, x.to("sim:1")), strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
def test_optimizers(kind, foreach):
    plain = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 2))
    other = copy.deepcopy(plain).to("sim")
    x = torch.randn(4, WIDTH)
    for model, data in ((plain, x), (other, x.to("sim"))):
        optimizer = kind(model.parameters(), lr=0.1, foreach=foreach)
        for _ in range(3):
            optimizer.zero_grad()
            model(data).square().mean().backward()
            optimizer.step()
    for expected, actual in zip(plain.parameters(), other.parameters(), strict=True):
        assert torch.equal(actual.cpu(), expected)


def test_autocast():
    layer = nn.Linear(WIDTH, 2).to("sim")
    x = torch.randn(4, WIDTH, device="sim")
    with torch.autocast("sim", dtype=torch.bfloat16):
        output = layer(x)
        assert output.dtype == torch.bfloat16
        assert F.layer_norm(output, (2,)).dtype == torch.float32
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected = copy.deepcopy(layer).to("cpu")(x.cpu())
    assert torch.equal(output.cpu(), expected)


def test_gradient_scaling():
    weight = torch.ones(3, device="sim", requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=1.0)
    scaler = torch.amp.GradScaler("sim", init_scale=4.0, growth_interval=1)
    for factor, scale, value in ((0.5, 8.0, 0.5), (float("inf"), 4.0, 0.5)):
        optimizer.zero_grad()
        scaler.scale((weight * factor).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        assert scaler.get_scale() == scale
        assert weight.tolist() == [value] * 3


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


def test_wrong_shapes_raise_at_the_launch():
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        torch.ones(2, 3, device="sim") @ torch.ones(2, 3, device="sim")


def test_results_whose_shape_depends_on_values_make_the_host_wait():
    x = torch.tensor([0.0, 2.0, 0.0, 3.0], device="sim")
    torch.accelerator.synchronize()
    simulated.reset_counts()
    assert x.nonzero().shape == (2, 1)
    assert x[x > 0].tolist() == [2, 3]
    assert torch.equal(x, x.clone())
    assert simulated.host_waits().keys() >= {"aten::nonzero", "aten::equal", "a copy to the host"}


def test_views_and_strides():
    x = torch.arange(24.0).reshape(4, 6)
    y = x.to("sim")
    y[1:3, ::2].mul_(-1)
    x[1:3, ::2].mul_(-1)
    assert torch.equal(y.cpu(), x)
    assert torch.equal(y.t()[2:].contiguous().cpu(), x.t()[2:])
    assert torch.equal(y.unfold(1, 2, 2).sum(-1).cpu(), x.unfold(1, 2, 2).sum(-1))
    assert y.t().to("sim:1").stride() == y.t().stride()


def test_tensors_of_the_host_are_taken_where_cuda_takes_them():
    x = torch.arange(4.0, device="sim")
    assert (x * torch.tensor(2.0)).tolist() == [0, 2, 4, 6]
    assert x[torch.tensor([3, 0])].tolist() == [3, 0]
    with pytest.raises(RuntimeError, match="same device"):
        x.index_add(0, torch.tensor([0]), torch.ones(1, device="sim")) + torch.ones(4)
