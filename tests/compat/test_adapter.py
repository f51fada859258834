"""Arguments as the old pipes check them."""

from typing import Any

import pytest
import torch
from torch import nn

from pipework.compat.adapter import checked_chunks, checked_mode, refuse_shared_parameters, refuse_unfit


@pytest.mark.parametrize("chunks", [3, "3", 3.7, torch.tensor(3)])
def test_chunks_are_what_int_takes(chunks: Any) -> None:
    assert checked_chunks(chunks) == 3


@pytest.mark.parametrize("chunks", [0, -1, "x"])
def test_other_chunks_are_refused(chunks: Any) -> None:
    with pytest.raises(ValueError, match=r"positive integer|invalid literal"):
        checked_chunks(chunks)


def test_modes() -> None:
    assert checked_mode("always") == "always"
    with pytest.raises(ValueError, match="checkpoint is not one of"):
        checked_mode("sometimes")


def test_modules_that_do_not_fit() -> None:
    layer = nn.ReLU()
    refuse_unfit(nn.Sequential(layer))
    with pytest.raises(TypeError, match=r"module must be nn.Sequential"):
        refuse_unfit(layer)
    with pytest.raises(ValueError, match="duplicate children"):
        refuse_unfit(nn.Sequential(layer, layer))


def test_a_parameter_may_be_shared_on_one_device_only() -> None:
    layer, devices = nn.Linear(1, 1), [torch.device("cpu"), torch.device("meta")]
    refuse_shared_parameters([layer, layer], [devices[0]] * 2)
    with pytest.raises(ValueError, match="duplicate parameters on distinct devices"):
        refuse_shared_parameters([layer, layer], devices)
