import time
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipework.compat.sync import balance_by_size, balance_by_time


class Sleep(nn.Module):
    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds

    def forward(self, x: Tensor, *others: Any) -> Any:
        time.sleep(self.seconds)
        return (x, *others) if others else x


def test_by_time() -> None:
    module = nn.Sequential(*(Sleep(0.01 * cost) for cost in (1, 2, 3, 4, 5, 6)))
    assert balance_by_time(2, module, torch.rand(1), timeout=0, device="cpu") == [4, 2]


def test_by_size() -> None:
    module = nn.Sequential(*(nn.Linear(100, 100) for _ in range(3)), nn.Linear(100, 300))
    assert balance_by_size(2, module, torch.rand(1, 100), chunks=1, param_scale=100, device="cpu") == [3, 1]


@pytest.mark.parametrize("kind", [list, tuple])
@pytest.mark.parametrize("balance", [balance_by_time, balance_by_size])
def test_several_inputs_come_as_a_list(balance: Any, kind: Any) -> None:
    sample = kind([torch.rand(2), torch.rand(2)])
    assert balance(1, nn.Sequential(Sleep(0), Sleep(0)), sample, device="cpu") == [2]
