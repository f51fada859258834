"""`nn.utils.clip_grad_norm_` is refused for parameters of a pipe that is in several processes, and for no others."""

import gc

import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_

from pipework.distributed.gradients.clip_check import ClipCheck


def test_own_parameters_are_refused_however_they_are_given() -> None:
    ours, others = nn.Linear(2, 2), nn.Linear(2, 2)
    ours(torch.ones(1, 2)).sum().backward()
    before = ours.weight.grad.clone()
    check = ClipCheck(ours.parameters)
    for parameters in (ours.parameters(), list(ours.parameters()), [*others.parameters(), ours.bias], ours.weight):
        with pytest.raises(RuntimeError, match=r"Call pipe\.clip_grad_norm_\(max_norm\) on all ranks"):
            clip_grad_norm_(parameters, 0.1)
    assert torch.equal(ours.weight.grad, before)
    clip_grad_norm_(others.parameters(), 0.1)
    del check


def test_afterwards_pytorch_is_as_before() -> None:
    clip = torch.nn.utils.clip_grad._clip_grads_with_norm_
    layers = [nn.Linear(2, 2) for _ in range(2)]
    checks = [ClipCheck(layer.parameters) for layer in layers]
    for layer in layers:
        with pytest.raises(RuntimeError, match="stages are in other processes"):
            clip_grad_norm_(layer.parameters(), 1.0)
    del checks[0]
    gc.collect()
    clip_grad_norm_(layers[0].parameters(), 1.0)
    checks.clear()
    gc.collect()
    assert torch.nn.utils.clip_grad._clip_grads_with_norm_ is clip
