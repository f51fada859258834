"""A module of which every trace that measuring could leave is known."""

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

import pytest
import torch
from torch import nn


@contextlib.contextmanager
def _untouched(module: nn.Module) -> Iterator[None]:
    state = {name: (tensor, tensor.clone(), tensor._version) for name, tensor in module.state_dict().items()}
    grads = {name: parameter.grad for name, parameter in module.named_parameters()}
    flags = [part.training for part in module.modules()]
    parts = list(module.modules())
    random_state = torch.get_rng_state()
    grad_mode = torch.is_grad_enabled()
    yield
    assert torch.is_grad_enabled() == grad_mode
    assert torch.equal(torch.get_rng_state(), random_state)
    assert list(module.modules()) == parts
    assert [part.training for part in module.modules()] == flags
    assert all(parameter.grad is grads[name] for name, parameter in module.named_parameters())
    after = module.state_dict()
    assert after.keys() == state.keys()
    for name, (tensor, value, version) in state.items():
        assert after[name].data_ptr() == tensor.data_ptr(), name
        assert torch.equal(after[name], value), name
        assert after[name]._version == version, name


@pytest.fixture
def untouched() -> Callable[[nn.Module], AbstractContextManager[None]]:
    """A context in which a module, the random state and the grad mode must not change."""
    return _untouched


@pytest.fixture
def delicate() -> nn.Sequential:
    """Layers with buffers, random numbers and a frozen part."""
    module = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.BatchNorm1d(4), nn.Linear(4, 2))
    module[3].eval()
    module[4].weight.requires_grad_(False)
    return module
