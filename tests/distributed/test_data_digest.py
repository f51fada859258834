"""Digests of mini-batches: alike for alike data, different for other rows, shapes and dtypes."""

import pytest
import torch

from pipework import NoChunk
from pipework.distributed.data_digest import NO_DATA, data_digest, tells_rows


def test_equal_data_has_equal_digests_whatever_their_memory() -> None:
    x = torch.randn(64, 48)
    assert data_digest((x,)) == data_digest((x.t().clone().t(),)) == data_digest((x.clone(),))


def test_other_data_has_other_digests() -> None:
    x = torch.randint(0, 9, (64, 784))
    others = [x.flip(0), x.roll(1, 0), x + 1, x[:-1], x.to(torch.int32), x.reshape(784, 64)]
    assert len({data_digest(each) for each in (x, *others)}) == len(others) + 1


def test_rows_that_differ_in_few_columns_are_seen() -> None:
    """Columns at equal distances are the same in all rows of padded images."""
    one, other = torch.zeros(64, 28, 28), torch.zeros(64, 28, 28)
    one[:, 10:18, 10:18] = torch.randn(64, 8, 8)
    other[:, 10:18, 10:18] = torch.randn(64, 8, 8)
    assert data_digest(one) != data_digest(other)


def test_every_kind_of_tensor_counts() -> None:
    kinds = (torch.bool, torch.bfloat16, torch.complex64, torch.int8)
    for dtype in kinds:
        assert data_digest(torch.zeros(4, 4, dtype=dtype)) != data_digest(torch.ones(4, 4, dtype=dtype))
    assert data_digest(torch.eye(3).to_sparse()) == data_digest(torch.eye(3).to_sparse())
    assert data_digest(torch.empty(3, device="meta")) != NO_DATA
    assert data_digest(torch.tensor(1.0)) != data_digest(torch.tensor(2.0))
    assert data_digest({"mask": NoChunk(torch.ones(3))}) != data_digest({"mask": NoChunk(torch.zeros(3))})


def test_without_tensors_there_is_nothing_to_compare() -> None:
    assert data_digest((None, {"rows": 3})) == data_digest(None) == NO_DATA
    assert data_digest(torch.empty(0, 4)) != NO_DATA


def test_constant_data_does_not_tell_rows() -> None:
    for constant in (torch.zeros(8, 2), torch.full((2000,), 3), torch.ones(3, dtype=torch.bfloat16), torch.empty(0)):
        assert not tells_rows(data_digest(constant))
    for varied in (
        torch.randn(8, 2),
        torch.randperm(2000),
        torch.tensor([1, 0, 1, 1]),
        torch.tensor([0, 1]),
        torch.eye(2, dtype=torch.bool),
        [torch.ones(2), torch.eye(2)],
    ):
        assert tells_rows(data_digest(varied))


def test_counted_rows_do_not_tell_rows() -> None:
    for counted in (torch.arange(3), torch.arange(2000), torch.arange(8.0).view(8, 1), torch.arange(9).flip(0)):
        assert not tells_rows(data_digest(counted))
    assert tells_rows(data_digest((torch.arange(3), torch.randn(3))))


def test_jagged_tensors_count_with_their_rows_and_not_with_a_number_of_the_process() -> None:
    rows = [torch.ones(2, 3), torch.zeros(4, 3)]
    one, other = (torch.nested.nested_tensor(rows, layout=torch.jagged) for _ in range(2))
    assert str(one.shape) != str(other.shape)
    assert data_digest(one) == data_digest(other)
    assert data_digest(one) != data_digest(torch.nested.nested_tensor(rows[::-1], layout=torch.jagged))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage")
def test_nested_tensors_of_the_old_layout_count_with_their_rows() -> None:
    rows = [torch.ones(2, 3), torch.zeros(4, 3)]
    assert data_digest(torch.nested.nested_tensor(rows)) == data_digest(torch.nested.nested_tensor(rows))
    assert data_digest(torch.nested.nested_tensor(rows)) != data_digest(torch.nested.nested_tensor(rows[::-1]))
