"""The warning on a rank whose layers have no parameters."""

from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

from pipework.distributed.parameter_check import check_parameters

PARTITIONS = [nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1)), nn.Sequential(nn.ReLU(), nn.Tanh())]


def warning(caplog: pytest.LogCaptureFixture, worker: int, partitions: Any = PARTITIONS, scaler: Any = None) -> str:
    caplog.clear()
    check_parameters(partitions, [0, 1], [4, 5], worker, scaler)
    return "".join(record.getMessage() for record in caplog.records)


def test_only_the_rank_without_parameters_warns(caplog: pytest.LogCaptureFixture) -> None:
    assert warning(caplog, 0) == ""
    text = warning(caplog, 1)
    assert text.startswith("no parameters are in the layers of rank 5 (stage 1: '0' ReLU, '1' Tanh)")
    assert "choose another balance=, such as [1, 3], or give them a group" in text
    assert "scaler" not in text


def test_with_a_scaler_the_warning_says_more(caplog: pytest.LogCaptureFixture) -> None:
    assert "leave out scaler.step(optimizer) on this rank" in warning(caplog, 1, scaler=object())
    assert "scaler" not in warning(caplog, 1, scaler=SimpleNamespace(is_enabled=lambda: False))


def test_too_few_layers_with_parameters(caplog: pytest.LogCaptureFixture) -> None:
    partitions = [nn.Sequential(nn.Linear(1, 1)), nn.Sequential(nn.ReLU())]
    assert "start fewer processes" in warning(caplog, 1, partitions)


def test_a_model_without_any_parameters(caplog: pytest.LogCaptureFixture) -> None:
    assert warning(caplog, 1, [nn.Sequential(nn.ReLU()), nn.Sequential(nn.Tanh())]) == ""
