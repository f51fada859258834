"""What would silently work with the layers of one process alone is refused: optimizers, and clipping of gradients."""

import gc

import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_
from torch.optim.optimizer import _global_optimizer_pre_hooks

from pipework.model.release import refuse_optimizers_of_others, refuse_partial_clipping


class Pipe:
    """Something that lives as long as a test wants."""


def test_afterwards_optimizers_are_free() -> None:
    layer = nn.Linear(2, 2)
    hooks = len(_global_optimizer_pre_hooks)
    refuse_optimizers_of_others(pipe := Pipe(), [("0.weight", "rank 1", layer.weight)])
    assert len(_global_optimizer_pre_hooks) == hooks + 1
    del pipe
    gc.collect()
    assert len(_global_optimizer_pre_hooks) == hooks
    torch.optim.SGD(layer.parameters(), lr=0.1).step()


def test_own_parameters_are_refused_however_they_are_given() -> None:
    ours, others = nn.Linear(2, 2), nn.Linear(2, 2)
    ours(torch.ones(1, 2)).sum().backward()
    before = ours.weight.grad.clone()
    refuse_partial_clipping(pipe := Pipe(), lambda: [ours])
    for parameters in (ours.parameters(), list(ours.parameters()), [*others.parameters(), ours.bias]):
        with pytest.raises(RuntimeError, match=r"Call pipe\.clip_grad_norm_\(max_norm\) on all ranks"):
            clip_grad_norm_(parameters, 0.1)
    assert torch.equal(ours.weight.grad, before)
    clip_grad_norm_(others.parameters(), 0.1)
    del pipe


def test_afterwards_pytorch_is_as_before() -> None:
    clip = torch.nn.utils.clip_grad._clip_grads_with_norm_
    layers = [nn.Linear(2, 2) for _ in range(2)]
    pipes = [Pipe() for _ in layers]
    for pipe, layer in zip(pipes, layers, strict=True):
        refuse_partial_clipping(pipe, lambda layer=layer: [layer])
    del pipe
    for layer in layers:
        with pytest.raises(RuntimeError, match="stages are in other processes"):
            clip_grad_norm_(layer.parameters(), 1.0)
    del pipes[0]
    gc.collect()
    clip_grad_norm_(layers[0].parameters(), 1.0)
    pipes.clear()
    gc.collect()
    assert torch.nn.utils.clip_grad._clip_grads_with_norm_ is clip


def test_norms_that_no_process_changes_are_allowed() -> None:
    layers = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))
    layers(torch.ones(1, 2)).sum().backward()
    refuse_partial_clipping(pipe := Pipe(), lambda: layers)
    for layer in (layers[0], layers[2]):
        clip_grad_norm_(layer.parameters(), 1.0)
    for parameter in layers.parameters():
        clip_grad_norm_(parameter, 1.0)
    with pytest.raises(RuntimeError, match=r"there are nn\.utils\.get_total_norm and nn\.utils\.clip_grads_with_norm_"):
        clip_grad_norm_([layers[0].weight, layers[2].weight], 1.0)
    with pytest.raises(RuntimeError, match="it would take the norm of this process's gradients only"):
        clip_grad_norm_(layers.parameters(), float("inf"))
    del pipe


def test_compiled_clipping_of_another_model_stays_one_graph() -> None:
    ours, other = nn.Linear(2, 2), nn.Linear(2, 2)
    other(torch.ones(1, 2)).sum().backward()
    refuse_partial_clipping(pipe := Pipe(), lambda: [ours])
    clip = torch.compile(lambda: clip_grad_norm_(list(other.parameters()), 0.1), backend="eager", fullgraph=True)
    assert clip() > 0
    del pipe
