"""What is peculiar to fairscale's `Pipe`; the rest is in `tests/compat/test_torchgpipe_and_fairscale.py`."""

import pytest
import torch
from torch import nn

from pipework.compat.fairscale.nn import Pipe, verify_module
from pipework.compat.fairscale.nn import pipe as package


def tied() -> nn.Sequential:
    a, b = nn.Linear(2, 2), nn.Linear(2, 2)
    b.weight = a.weight
    return nn.Sequential(a, nn.Tanh(), b)


def test_partitions_may_share_a_parameter_on_one_device() -> None:
    module = tied()
    pipe = Pipe(module, [1, 2], devices=["cpu"] * 2, chunks=2)
    x = torch.ones(4, 2)
    pipe(x).sum().backward()
    assert pipe[0].weight is pipe[2].weight
    (expected,) = torch.autograd.grad(module(x).sum(), [module[0].weight])
    torch.testing.assert_close(pipe[0].weight.grad, expected)


def test_partitions_on_several_devices_cannot_share_a_parameter() -> None:
    with pytest.raises(ValueError, match=r"^module with duplicate parameters on distinct devices is not supported$"):
        Pipe(tied(), [1, 2], devices=["cpu", "meta"])


def test_verify_module() -> None:
    verify_module(tied())
    layer = nn.Linear(2, 2)
    with pytest.raises(TypeError, match=r"must be nn\.Sequential"):
        verify_module(layer)
    with pytest.raises(ValueError, match="duplicate children"):
        verify_module(nn.Sequential(layer, layer))


def test_a_parameter_may_be_shared_later() -> None:
    pipe = Pipe(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), [1, 1], devices=["cpu"] * 2)
    pipe.partitions[1][0].weight = pipe[0].weight
    pipe(torch.ones(4, 2)).sum().backward()
    assert pipe[0].weight.grad is not None


def test_public_names() -> None:
    assert {"Pipe", "is_checkpointing", "is_recomputing"} <= set(package.__all__)
    assert package.Pipe is Pipe
