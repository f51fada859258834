"""DTensors."""

import sys
from types import ModuleType

import pytest
import torch

from pipework.values.dtensor import is_dtensor


def test_a_tensor_is_no_dtensor_while_another_thread_imports_them(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "torch.distributed.tensor"
    monkeypatch.setitem(sys.modules, name, ModuleType(name))  # as it is before its first line has run
    assert not is_dtensor(torch.ones(1))
