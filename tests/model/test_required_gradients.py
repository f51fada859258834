"""The number that says which inputs require a gradient."""

import torch

from pipework.model.microbatch import split
from pipework.model.required_gradients import gradients_are_there, required_gradients


def number(*required: bool, rows: int = 4, chunks: int = 2) -> int:
    tensors = tuple(torch.zeros(rows, 2, requires_grad=each) for each in required)
    return required_gradients(split(tensors, {}, chunks))


def test_a_part_of_what_is_computed_may_be_wanted() -> None:
    both = number(True, True)
    assert number(False, False) == 0
    assert all(gradients_are_there(wanted, both) for wanted in (0, number(True, False), number(False, True), both))
    assert not gradients_are_there(both, number(True, False))
    assert not gradients_are_there(both, 0)


def test_other_tensors_have_other_gradients() -> None:
    computed = number(True, True)
    for other in (number(True), number(True, True, True), number(True, True, rows=5), number(True, True, chunks=4)):
        assert not gradients_are_there(other, computed)


def test_of_many_tensors_it_is_a_number_of_64_bits() -> None:
    assert 0 < number(*[True] * 100) < 2**63
