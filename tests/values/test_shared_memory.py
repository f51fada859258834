from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from pipework.values.shared_memory import apart, together

X = torch.arange(24.0).view(4, 6)


Z = torch.view_as_complex(X.clone().view(4, 3, 2))


@pytest.mark.parametrize(
    ("tensors", "carried"),
    [
        ([X], [96]),
        ([X, None, X.t()], [96, None, None]),
        ([X[:, :3], X[:, 3:]], [48, 48]),
        ([X[1:3, :4], X[2:, 3:]], [72, None]),
        ([X[:2], X[2:], X[1:3]], [96, None, None]),
        ([X[:1], X[3:], X[0, 2:], X[3, :1]], [24, 24, None, None]),  # nothing of what lies between
        ([X, X.clone()], [96, 96]),
        ([X[:2], X.view(torch.int32), X.view(torch.int8)[3, 1:]], [96, None, None]),
        ([Z[1:], Z.conj(), torch.view_as_real(Z).double()], [96, None, 192]),
        ([X, X[:0], X.to_sparse(), torch.nn.Parameter(X)], [96, 0, 96, 96]),
    ],
)
def test_each_element_is_carried_once(tensors: Sequence[Tensor | None], carried: list[int | None]) -> None:
    given, parts = together(tuple(tensors))
    assert [None if each is None else each.numel() * each.element_size() for each in given] == carried
    for one, other in zip(tensors, apart(given, parts), strict=True):
        assert one is other or (one is not None and other is not None and torch.equal(one, other))


def test_a_change_of_one_changes_those_of_other_types() -> None:
    z = Z.clone()
    given, parts = together((torch.view_as_real(z)[..., 1], z.conj()))
    imaginary, conjugates = apart(tuple(each if each is None else each.clone() for each in given), parts)
    assert imaginary is not None
    assert conjugates is not None
    imaginary.zero_()
    assert torch.equal(conjugates, Z.real.to(Z.dtype))
    assert conjugates._version == imaginary._version


def test_they_share_memory_and_the_version_counter_where_they_arrive() -> None:
    x = X.clone()
    given, parts = together((x[:3].requires_grad_(), x[1:]))
    one, other = apart(tuple(each if each is None else each.clone() for each in given), parts)
    assert one is not None
    assert other is not None
    assert (one.is_leaf, one.requires_grad, other.requires_grad) == (True, True, False)
    assert (one.stride(), other.stride()) == ((6, 1), (6, 1))
    before = one._version
    other.zero_()
    assert one._version > before
    assert torch.equal(one[1:], torch.zeros(2, 6))
    assert torch.equal(one[:1], X[:1])
