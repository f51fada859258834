import pytest
import torch
from torch import Tensor

from pipework.autograd.weight_split.operation import Operation


class Linear(Operation):
    name = "linear"


def waiting(kept: Tensor) -> tuple[Operation, list[tuple[Operation, Tensor, Tensor]]]:
    operation, queue = Linear(), []
    operation.kept = kept
    operation.wait_in(queue)
    return operation, queue


def test_a_gradient_that_is_differentiated_is_refused() -> None:
    operation, _ = waiting(torch.ones(2))
    with pytest.raises(RuntimeError, match=r"create_graph=True.* schedule without I and W"):
        operation((torch.ones(2),))
