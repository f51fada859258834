"""What processes must have in common."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from pipework.assignment.assignment import assign
from pipework.distributed.contract import contract
from pipework.schedule import ScheduleSpec, fill_drain, one_forward_one_backward


def model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 2), nn.BatchNorm1d(2))


def agreed(change: Callable[[nn.Sequential], object], **settings: Any) -> dict[str, Any]:
    module = model()
    change(module)
    return contract(module, assign(module, "gpipe", 1, [2, 2], ["cpu", "cpu"]), **settings)


def tie(module: nn.Sequential) -> None:
    module[2].weight = module[0].weight


def put(name: str, layer: nn.Module) -> Callable[[nn.Sequential], object]:
    return lambda module: setattr(module, name, layer)


@pytest.mark.parametrize(
    ("change", "key", "name", "form"),
    [
        (tie, "parameters", "2.weight", "torch.float32 (2, 2), tied to 0.weight"),
        (lambda module: module[2].half(), "parameters", "2.bias", "torch.float16 (2,)"),
        (put("2", nn.Linear(2, 3)), "parameters", "2.bias", "torch.float32 (3,)"),
        (put("2", nn.Linear(2, 2, bias=False)), "parameters", "2.bias", None),
        (lambda module: module[3].register_buffer("more", torch.ones(1)), "parameters", "3.more", "torch.float32 (1,)"),
    ],
)
def test_what_makes_a_difference(change: Any, key: str, name: str, form: str | None) -> None:
    assert agreed(change) != agreed(lambda module: None)
    assert agreed(change)[key].get(name) == form


@pytest.mark.parametrize(
    "change",
    [
        lambda module: module[0].requires_grad_(False),  # it may be in another process, or thawed after a step
        lambda module: nn.init.zeros_(module[0].weight),
        lambda module: module.eval(),
    ],
)
def test_what_makes_none(change: Any) -> None:
    assert agreed(change) == agreed(lambda module: None)


def test_a_spec_of_ones_own_is_compared_by_its_orders() -> None:
    def of(schedule: Any) -> str:
        module = model()
        return contract(module, assign(module, schedule, 3, [2, 2], ["cpu", "cpu"]), chunks=3)["schedule"]

    assert of(ScheduleSpec(fill_drain)) == of(fill_drain(2, 3))
    assert of(ScheduleSpec(one_forward_one_backward)) == of(one_forward_one_backward(2, 3))
    assert of(ScheduleSpec(fill_drain)) != of(ScheduleSpec(one_forward_one_backward))


def test_settings_are_compared_too() -> None:
    assert agreed(tie, chunks=2) != agreed(tie, chunks=3)
