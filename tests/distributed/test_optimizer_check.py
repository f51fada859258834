"""An optimizer that has parameters of other processes is refused at its first step."""

import gc

import pytest
import torch
from torch import nn
from torch.optim.optimizer import _global_optimizer_pre_hooks

from pipework.distributed.optimizer_check import OptimizerCheck
from pipework.model.release import release_layers


def test_parameters_of_other_processes_are_named() -> None:
    ours, theirs = nn.Linear(2, 2), nn.Linear(2, 2)
    check = OptimizerCheck([(f"1.{name}", "rank 3", parameter) for name, parameter in theirs.named_parameters()])
    early = torch.optim.Adam([*ours.parameters(), *theirs.parameters()])
    with pytest.raises(
        RuntimeError,
        match=r"\(Adam\) has 2 parameters of layers that are in other processes \(rank 3\): 1\.weight, 1\.bias\.",
    ):
        early.step()
    own = torch.optim.SGD(ours.parameters(), lr=0.1)
    own.step()
    own.add_param_group({"params": [theirs.bias]})
    with pytest.raises(RuntimeError, match=r"has 1 parameters .*: 1\.bias"):
        own.step()
    del check


def test_parameters_that_came_after_are_named_too() -> None:
    ours, theirs = nn.Linear(2, 2), nn.Linear(2, 2)
    check = OptimizerCheck([])
    release_layers([("1", theirs, "rank 1")], [ours])
    with pytest.raises(RuntimeError, match=r"\(SGD\) has 2 parameters .* \(rank 1\): 1\.weight, 1\.bias"):
        torch.optim.SGD([*ours.parameters(), *theirs.parameters()]).step()
    del check


def test_afterwards_optimizers_are_free() -> None:
    layer = nn.Linear(2, 2)
    hooks = len(_global_optimizer_pre_hooks)
    check = OptimizerCheck([("0.weight", "rank 1", layer.weight)])
    assert len(_global_optimizer_pre_hooks) == hooks + 1
    del check
    gc.collect()
    assert len(_global_optimizer_pre_hooks) == hooks
    torch.optim.SGD(layer.parameters(), lr=0.1).step()
