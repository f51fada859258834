from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pipework.values import nested

plain = st.none() | st.booleans() | st.integers() | st.text(max_size=3)
tensors = st.integers(0, 3).map(lambda size: torch.arange(size))
nested_values = st.recursive(
    plain | tensors,
    lambda inner: (
        st.lists(inner, max_size=3) | st.tuples(inner, inner) | st.dictionaries(st.text(max_size=2), inner, max_size=3)
    ),
    max_leaves=8,
)


def equal(left: object, right: object) -> bool:
    if isinstance(left, torch.Tensor):
        return left is right
    if isinstance(left, (list, tuple)):
        return type(left) is type(right) and len(left) == len(right) and all(map(equal, left, right))
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(equal(left[key], right[key]) for key in left)
    return left == right and type(left) is type(right)


@given(nested_values)
def test_a_value_survives_being_taken_apart(value: object) -> None:
    assert equal(nested.unflatten(*nested.flatten(value)), value)


def test_a_single_tensor_needs_no_structure() -> None:
    tensor = torch.zeros(1)
    assert nested.flatten(tensor) == ((tensor,), None)


def test_plain_values_are_collected_and_tensors_keep_their_places() -> None:
    structures = [nested.flatten((torch.zeros(1), {"rows": rows}))[1] for rows in (3, 2)]
    tensor = torch.ones(1)
    assert nested.unflatten((tensor,), nested.collect(structures)) == (tensor, {"rows": [3, 2]})


@pytest.mark.parametrize(
    ("left", "right", "same"),
    [
        ((torch.zeros(1), 5), (torch.ones(2), 6), True),
        ((torch.zeros(1), 5), (5, torch.zeros(1)), False),
        ((torch.zeros(1),), [torch.zeros(1)], False),
        (torch.zeros(1), torch.zeros(2), True),
        (torch.zeros(1), (torch.zeros(1),), False),
    ],
)
def test_same_nesting(left: object, right: object, same: bool) -> None:
    assert nested.same_nesting(nested.flatten(left)[1], nested.flatten(right)[1]) is same


def test_describe_names_tensors_and_types() -> None:
    assert nested.describe(nested.flatten((torch.zeros(1), 5, [None]))[1]) == "(tensor, int, [NoneType])"
    assert nested.describe(None) == "tensor"


@pytest.mark.parametrize(
    "make", [lambda: iter([1, 2]), lambda: iter(()), lambda: set(range(10**6)), lambda: {"a": 1}.keys()]
)
def test_collections_and_iterators_of_plain_values_are_values(make: Callable[[], object]) -> None:
    value = make()
    tensors, structure = nested.flatten((torch.ones(1), value))
    assert nested.unflatten(tensors, structure)[1] is value


def test_without_gradients_a_function_may_hold_a_parameter() -> None:
    parameter = torch.nn.Parameter(torch.ones(1))
    with torch.no_grad():
        nested.flatten((parameter * 2, lambda: parameter))
    with pytest.raises(TypeError, match="in its closure"):
        nested.flatten((parameter * 2, lambda: parameter))
