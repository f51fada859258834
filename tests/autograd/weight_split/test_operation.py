import pytest
import torch
from torch import Tensor

from pipework.autograd.weight_split.operation import DeferrableAlias, Operation, computed_with
from pipework.autograd.weight_split.store import WeightGradientAlias, WeightGradientStore


def alias_of(values: Tensor) -> DeferrableAlias:
    return WeightGradientAlias.of(values, WeightGradientStore({}), None)


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


def test_an_input_that_was_changed_in_place_is_an_error() -> None:
    kept = torch.ones(2)
    operation, _ = waiting(kept)
    kept.add_(1)
    with (
        torch.no_grad(),
        pytest.raises(RuntimeError, match=r"input of linear, of shape .* version 1; expected version 0"),
    ):
        operation((torch.ones(2),))


def test_a_gradient_that_is_differentiated_is_refused() -> None:
    operation, _ = waiting(torch.ones(2))
    with pytest.raises(RuntimeError, match=r"create_graph=True.* schedule without I and W"):
        operation((torch.ones(2),))


def test_operators_read_the_memory_of_an_alias() -> None:
    alias, x = alias_of(torch.ones(2, 2)), torch.ones(2)
    plain, same, none = computed_with(alias, x, None)
    assert type(plain) is Tensor
    assert plain.data_ptr() == alias.data_ptr()
    assert same is x
    assert none is None


def test_autocast_copies_a_parameter_once() -> None:
    alias = alias_of(torch.ones(2, 2))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        (one,), (two,) = computed_with(alias), computed_with(alias)
        (double,) = computed_with(torch.ones(1, dtype=torch.float64))
    assert one is two
    assert one.dtype is torch.bfloat16
    assert double.dtype is torch.float64
