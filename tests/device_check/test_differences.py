import math

import torch

from pipework.device_check.differences import difference


def test_equal_values() -> None:
    values = [{"loss": torch.tensor(1.0), "output": torch.arange(3)}]
    assert difference(values, [dict(values[0])]) is None


def test_a_tolerance_is_relative_to_the_largest_element() -> None:
    expected = [{"x": torch.tensor([100.0, 0.0])}]
    assert difference([{"x": torch.tensor([100.0, 0.009])}], expected, 1e-4) is None
    assert difference([{"x": torch.tensor([100.0, 0.011])}], expected, 1e-4) is not None


def test_nan_is_never_within_a_tolerance() -> None:
    text = difference([{"x": torch.tensor([1.0, math.nan])}], [{"x": torch.tensor([1.0, 1.0])}], 0.1)
    assert text == "step 0: x: 1 of 2 elements differ, 1 are NaN, the largest difference is 0 (the largest element 1)"


def test_the_first_wrong_step_and_the_number_of_others() -> None:
    good, bad = ({"a": torch.tensor([value]), "b": torch.tensor([value])} for value in (1.0, 1.5))
    text = difference([good, bad], [good, good])
    facts = "1 of 1 elements differ, the largest difference is 0.5 (the largest element 1)"
    assert text == f"step 1: a: {facts}; and 1 more of 2 tensors"


def test_another_dtype_differs() -> None:
    text = difference([{"x": torch.ones(2)}], [{"x": torch.ones(2).double()}])
    assert text == "step 0: x: torch.float32 (2,) instead of torch.float64 (2,)"
