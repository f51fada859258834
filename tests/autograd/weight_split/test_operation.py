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


def test_the_hook_stores_what_is_kept_with_the_gradient() -> None:
    kept, gradient = torch.ones(2, requires_grad=True) * 2, torch.ones(2)
    operation, queue = waiting(kept)
    with torch.no_grad():
        operation((None,))
        operation((gradient,))
    ((stored, without_graph, of_output),) = queue
    assert stored is operation
    assert of_output is gradient
    assert not without_graph.requires_grad
    assert without_graph.data_ptr() == kept.data_ptr()


def test_a_gradient_that_is_differentiated_is_refused() -> None:
    operation, _ = waiting(torch.ones(2))
    with pytest.raises(RuntimeError, match=r"create_graph=True.* schedule without I and W"):
        operation((torch.ones(2),))
