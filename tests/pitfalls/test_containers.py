"""What other pipelines lost of the user's modules: their forward, their names, their place, and the right to a copy."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipework import Pipe, WithDevice
from tests.helpers import saved_and_loaded

CHECKPOINT_MODES = ("never", "except_last", "always")


# 15


class Residual(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        return x + super().forward(x)


class Twice(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(super().forward(x))


@pytest.mark.parametrize("balance", [[4], [1, 3], [1, 1, 1, 1]], ids=str)
@pytest.mark.parametrize("checkpoint", CHECKPOINT_MODES)
def test_15_a_sequence_with_a_forward_of_its_own(
    checkpoint: str, balance: list[int], assert_trained_alike: Callable[..., None]
) -> None:
    """Nested sequences were flattened: a residual branch lost its sum, and hooks on the sequence never fired.

    As the outermost module such a sequence is refused: tests/exactness/test_odd_modules.py.
    """
    plain = nn.Sequential(
        nn.Linear(6, 6),
        Residual(nn.Linear(6, 6), nn.Dropout(0.2), nn.Tanh()),
        Residual(Twice(nn.Linear(6, 6), nn.Tanh()), nn.LayerNorm(6)),
        nn.Sequential(nn.Linear(6, 6), nn.Tanh()),
    )
    plain[3].register_forward_hook(lambda module, inputs, output: output * 2 + inputs[0])
    pipe = Pipe(copy.deepcopy(plain), 3, checkpoint, balance=balance, devices=["cpu"] * len(balance))
    assert len(pipe) == 4
    assert_trained_alike(plain, pipe, [(torch.randn(7, 6),) for _ in range(3)])


# 18


def model() -> nn.Sequential:
    shared = nn.Linear(6, 6)
    return nn.Sequential(shared, nn.BatchNorm1d(6), nn.Dropout(0.2), shared, nn.Linear(6, 3))


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda pipe: pickle.loads(pickle.dumps(pipe)), saved_and_loaded])
@pytest.mark.parametrize("used", [False, True])
@pytest.mark.parametrize("deferred", [False, True])
def test_18_copies_and_pickles(
    deferred: bool, used: bool, duplicate: Callable[[Pipe], Any], assert_trained_alike: Callable[..., None]
) -> None:
    """A pipe held streams and threads, which can be neither copied nor pickled. Here a copy trains as a new pipe of the
    same module does, the original sees nothing of it, and neither does the copy of the original.
    """
    original = Pipe(model(), 3, "always", deferred, balance=[2, 3], devices=["cpu"] * 2)
    x = torch.randn(9, 6)
    if used:
        original(x).sum().backward()
    plain = copy.deepcopy(nn.Sequential(*original))
    twin = duplicate(original)
    assert type(twin) is Pipe
    assert (twin.chunks, twin.checkpoint, twin.balance, twin.devices) == (3, "always", [2, 3], original.devices)
    assert twin[0] is twin[3]
    before = {name: tensor.clone() for name, tensor in original.state_dict().items()}
    for module in (plain, original, twin):
        module.zero_grad()
    if not deferred:
        batches = [(torch.randn(9, 6).double(),) for _ in range(3)]
        assert_trained_alike(plain.double(), twin.double(), batches, same=near)
    else:
        twin(x).sum().backward()
        assert twin[1].num_batches_tracked == original[1].num_batches_tracked + 1
    assert all(torch.equal(original.state_dict()[name], tensor) for name, tensor in before.items())
    assert all(parameter.grad is None for parameter in original.parameters())
    original(x).sum().backward()


def near(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-14)  # a layer of two stages is summed per stage


# 19


@pytest.mark.parametrize("balance", [[5], [2, 3], [1, 1, 1, 1, 1]], ids=str)
@pytest.mark.parametrize("deferred", [False, True])
def test_19_a_plain_state_dict_loads(deferred: bool, balance: list[int]) -> None:
    """Names had the number of the partition in them: no checkpoint could be loaded into another balance, or into the
    model without a pipeline.
    """
    plain, module = model(), model()
    plain(torch.randn(4, 6))
    pipe = Pipe(module, 2, deferred_batch_norm=deferred, balance=balance, devices=["cpu"] * len(balance))
    assert list(pipe.children()) == list(module.children())
    assert list(pipe.state_dict()) == list(plain.state_dict())
    assert [name for name, _ in pipe.named_parameters()] == [name for name, _ in plain.named_parameters()]
    pipe.load_state_dict(plain.state_dict())
    x = torch.randn(4, 6)
    for evaluated in (pipe, plain):
        evaluated.eval()
    assert torch.equal(pipe(x), torch.cat([plain(x[:2]), plain(x[2:])]))
    pipe.train()
    pipe(x).sum().backward()
    back = model()
    back.load_state_dict(pipe.state_dict())
    assert torch.equal(back[1].running_mean, pipe[1].running_mean)


# 22


class Where(nn.Module):
    """Has no parameters, but a buffer; notes where its input and its buffer lie."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(()))
        self.seen: list[tuple[str, str]] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append((x.device.type, self.scale.device.type))
        return x * self.scale


def places(first: str, second: str) -> nn.Sequential:
    """Six layers, of which the second and the fifth alone have parameters."""
    return nn.Sequential(Where(), lying(first), Where(), nn.ReLU(), lying(second), Where())


def lying(device: str) -> nn.Module:
    """What is on the meta device lies nowhere, and must say that it is to stay there."""
    layer = nn.Linear(4, 4, device=device)
    return WithDevice(layer, device) if device == "meta" else layer


def accelerator() -> str:
    found = torch.accelerator.current_accelerator()
    return "none" if found is None else found.type


@pytest.mark.parametrize(
    ("first", "second"),
    [("cpu", "meta"), ("meta", "cpu"), pytest.param(accelerator(), "cpu", marks=pytest.mark.gpu)],
)
def test_22_layers_without_parameters_stay_with_their_neighbour(first: str, second: str) -> None:
    """Nothing told where they belonged, so they were put on the CPU, and each micro-batch was copied there and back."""
    pipe = Pipe(places(first, second), 2)
    assert [device.type for device in pipe.devices] == [first, second]
    assert pipe.balance == [4, 2]
    assert [layer.scale.device.type for layer in pipe if isinstance(layer, Where)] == [first, first, second]
    if "meta" in (first, second):
        return  # there is nothing to compute
    pipe.eval()
    with torch.no_grad():
        assert pipe(torch.randn(4, 4)).device.type == second
    assert [layer.seen for layer in pipe if isinstance(layer, Where)] == [
        [(first, first)] * 2,
        [(first, first)] * 2,
        [(second, second)] * 2,
    ]
