import pytest
import torch

from pipework.runtime.stage.finite import refuse_non_finite


def test_finite_values_none_and_integers_pass() -> None:
    refuse_non_finite([None, torch.ones(2), torch.arange(3), torch.ones(1, dtype=torch.complex64)], "x")


def test_the_error_counts_nan_and_infinities() -> None:
    bad = torch.tensor([1.0, float("nan"), float("inf"), -float("inf")])
    with pytest.raises(FloatingPointError, match=r"^the loss is not finite: 1 NaN and 2 infinite of 4 values"):
        refuse_non_finite([torch.ones(1), bad], "the loss")


def test_sparse_values_are_added_up_first() -> None:
    index = torch.tensor([[0, 0]])
    refuse_non_finite([torch.sparse_coo_tensor(index, torch.tensor([1.0, 2.0]), (2,), check_invariants=True)], "x")
    with pytest.raises(FloatingPointError, match="1 NaN"):
        refuse_non_finite(
            [torch.sparse_coo_tensor(index, torch.tensor([1e38, float("nan")]), (2,), check_invariants=True)], "x"
        )
