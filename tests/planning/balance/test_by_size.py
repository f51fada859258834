import pytest
import torch
from torch import nn

from pipework import balance_by_size


def sizes(module, input, monkeypatch, **options):
    """The sizes that balance_by_size finds, in bytes."""
    found = []
    monkeypatch.setattr(
        "pipework.planning.balance.by_size.minimax_partition", lambda sizes, partitions: found.extend(sizes)
    )
    balance_by_size(1, module, input, **options)
    return found


class Expand(nn.Module):
    """Saves `times` as many bytes for backward as its input has."""

    def __init__(self, times):
        super().__init__()
        self.times = times

    def forward(self, x):
        for _ in range(self.times):
            x = x.sin()
        return x


class Two(nn.Module):
    def forward(self, a, b):
        return a + b, a * b


class Whole(nn.Module):
    def forward(self, pair):
        a, b = pair
        return a - b


@pytest.mark.parametrize("device", ["cpu", "meta", pytest.param(0, marks=pytest.mark.gpu)])
def test_counts_parameters_and_activations(device, monkeypatch):
    module = nn.Sequential(nn.Linear(4, 8, bias=False), nn.ReLU(), nn.Linear(8, 2, bias=False))
    # bytes: weights 128 and 64, twice; the batch of 3 saves the input (48) and makes 96, 96 (saved once), 24
    assert sizes(module, torch.zeros(3, 4), monkeypatch, device=device) == [256 + 48 + 96, 96, 128 + 24]


def test_param_scale_and_chunks(monkeypatch):
    module = nn.Sequential(nn.Linear(4, 8, bias=False))
    assert sizes(module, torch.zeros(9, 4), monkeypatch, chunks=4, param_scale=3, device="cpu") == [
        384 + 3 * 16 + 3 * 32
    ]
    assert sizes(module, torch.zeros(2, 4), monkeypatch, chunks=8, param_scale=0, device="cpu") == [16 + 32]


def test_memory_that_is_only_viewed_counts_once(monkeypatch):
    module = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Flatten(), nn.Identity())
    assert sizes(module, torch.zeros(2, 4), monkeypatch, param_scale=0, device="cpu") == [32 + 32, 0, 0]


def test_balances_what_is_saved():
    module = nn.Sequential(*(Expand(times) for times in [1, 2, 3, 4, 5, 6]))
    x = torch.rand(8, 10, requires_grad=True)
    assert balance_by_size(2, module, x, device="cpu") == [4, 2]


def test_tuples_are_spread_unless_one_argument_is_taken(monkeypatch):
    module = nn.Sequential(Two(), Two(), Whole())
    pair = (torch.ones(4, 2), torch.ones(4, 2))
    assert len(sizes(module, pair, monkeypatch, chunks=2, device="cpu")) == 3


def test_leaves_no_trace(delicate, untouched):
    delicate[0].weight.grad = torch.ones(4, 4)
    x = torch.rand(6, 4, requires_grad=True)
    with untouched(delicate), torch.no_grad():
        balance_by_size(2, delicate, x, device="cpu")
    assert x.grad is None


def test_layers_that_overwrite_their_input_add_nothing_and_the_input_stays_as_it_is(monkeypatch):
    module = nn.Sequential(nn.Linear(2, 2, bias=False), nn.ReLU(inplace=True), nn.ReLU(inplace=True))
    input = torch.tensor([[-1.0, 1.0]])
    assert sizes(module, input, monkeypatch, param_scale=0, device="cpu") == [8 + 8, 0, 0]
    sizes(module[1:], input, monkeypatch, device="cpu")
    assert input.tolist() == [[-1, 1]]


def test_lazy_layers_count_with_the_shape_that_the_input_gives_them(monkeypatch):
    module = nn.Sequential(nn.LazyLinear(8, bias=False))
    assert sizes(module, torch.zeros(3, 4), monkeypatch, device="cpu") == [256 + 48 + 96]
    assert isinstance(module[0], nn.LazyLinear)


@pytest.mark.parametrize(
    ("partitions", "options", "message"),
    [
        (0, {}, "at least 1, got 0"),
        (3, {}, "cannot make 3 partitions of 2 layers"),
        (1, {"chunks": 0}, "chunks must be at least 1, got 0"),
        (1, {"param_scale": -1.0}, "must not be negative, got -1.0"),
    ],
)
def test_refuses_what_makes_no_sense(partitions, options, message):
    with pytest.raises(ValueError, match=message):
        balance_by_size(partitions, nn.Sequential(nn.ReLU(), nn.ReLU()), torch.zeros(1), **options)
