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
    check = ClipCheck(lambda: [ours])
    for parameters in (ours.parameters(), list(ours.parameters()), [*others.parameters(), ours.bias]):
        with pytest.raises(RuntimeError, match=r"Call pipe\.clip_grad_norm_\(max_norm\) on all ranks"):
            clip_grad_norm_(parameters, 0.1)
    assert torch.equal(ours.weight.grad, before)
    clip_grad_norm_(others.parameters(), 0.1)
    del check


def test_afterwards_pytorch_is_as_before() -> None:
    clip = torch.nn.utils.clip_grad._clip_grads_with_norm_
    layers = [nn.Linear(2, 2) for _ in range(2)]
    checks = [ClipCheck(lambda layer=layer: [layer]) for layer in layers]
    for layer in layers:
        with pytest.raises(RuntimeError, match="stages are in other processes"):
            clip_grad_norm_(layer.parameters(), 1.0)
    del checks[0]
    gc.collect()
    clip_grad_norm_(layers[0].parameters(), 1.0)
    checks.clear()
    gc.collect()
    assert torch.nn.utils.clip_grad._clip_grads_with_norm_ is clip


def test_norms_that_no_process_changes_are_allowed() -> None:
    layers = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))
    layers(torch.ones(1, 2)).sum().backward()
    check = ClipCheck(lambda: layers)
    for layer in (layers[0], layers[2]):
        clip_grad_norm_(layer.parameters(), 1.0)
    for parameter in layers.parameters():
        clip_grad_norm_(parameter, 1.0)
    with pytest.raises(RuntimeError, match=r"there are nn\.utils\.get_total_norm and nn\.utils\.clip_grads_with_norm_"):
        clip_grad_norm_([layers[0].weight, layers[2].weight], 1.0)
    with pytest.raises(RuntimeError, match="it would take the norm of this process's gradients only"):
        clip_grad_norm_(layers.parameters(), float("inf"))
    del check


def test_compiled_clipping_of_another_model_stays_one_graph() -> None:
    ours, other = nn.Linear(2, 2), nn.Linear(2, 2)
    other(torch.ones(1, 2)).sum().backward()
    check = ClipCheck(lambda: [ours])
    clip = torch.compile(lambda: clip_grad_norm_(list(other.parameters()), 0.1), backend="eager", fullgraph=True)
    assert clip() > 0
    del check
