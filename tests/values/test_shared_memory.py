from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from pipework.values.shared_memory import apart, together

X = torch.arange(24.0).view(4, 6)


@pytest.mark.parametrize(
    ("tensors", "carried"),
    [
        ([X], [24]),
        ([X, None, X.t()], [24, None, None]),
        ([X[:, :3], X[:, 3:]], [12, 12]),
        ([X[1:3, :4], X[2:, 3:]], [18, None]),
        ([X[:2], X[2:], X[1:3]], [24, None, None]),
        ([X, X.clone()], [24, 24]),
        ([X, X.view(torch.int32)], [24, 24]),
        ([torch.view_as_complex(X.view(4, 3, 2)), torch.view_as_complex(X.view(4, 3, 2)).conj()], [12, 12]),
        ([X, X[:0], X.to_sparse(), torch.nn.Parameter(X)], [24, 0, 24, 24]),
    ],
)
def test_each_element_is_carried_once(tensors: Sequence[Tensor | None], carried: list[int | None]) -> None:
    given, parts = together(tuple(tensors))
    assert [None if each is None else each.numel() for each in given] == carried
    for one, other in zip(tensors, apart(given, parts), strict=True):
        assert one is other or (one is not None and other is not None and torch.equal(one, other))


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
