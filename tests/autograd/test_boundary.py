import pytest
import torch

from pipework.autograd.boundary import cut, enter, report_overwriting


def test_enter_is_differentiable() -> None:
    assert torch.autograd.gradcheck(enter, torch.randn(3, 2, dtype=torch.float64, requires_grad=True))


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.randn(()),
        lambda: torch.randn(0, 2),
        lambda: torch.randn(3, 2).t(),
        lambda: torch.randn(1, 2).expand(3, 2),
    ],
    ids=["scalar", "empty", "transposed", "expanded"],
)
def test_what_enters_is_the_same_memory_and_strides(make: object) -> None:
    leaf = make().requires_grad_()
    alias = enter(leaf)
    assert alias.data_ptr() == leaf.data_ptr()
    assert alias.stride() == leaf.stride()
    assert torch.equal(alias, leaf)
    alias.sum().backward()
    assert torch.equal(leaf.grad, torch.ones_like(leaf))


def test_what_enters_may_be_overwritten() -> None:
    leaf = cut(torch.ones(3, requires_grad=True) * 2)
    alias = enter(leaf)
    alias.mul_(3)
    alias.sum().backward()
    assert torch.equal(leaf.grad, torch.full((3,), 3.0))
    assert torch.equal(leaf, torch.full((3,), 6.0))
    assert report_overwriting(leaf, alias)


def test_a_sender_that_saved_the_tensor_notices_that_it_was_overwritten() -> None:
    x = torch.randn(3, requires_grad=True)
    sent = x.sigmoid()
    leaf = cut(sent)
    alias = enter(leaf)
    assert not report_overwriting(leaf, alias)
    alias.relu_()
    assert report_overwriting(leaf, alias)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        sent.sum().backward()


def test_a_tensor_without_gradient_enters_as_it_is() -> None:
    x = torch.ones(2)
    assert enter(x) is x
    assert not cut(x).requires_grad


def test_a_sparse_tensor_enters_as_it_is() -> None:
    leaf = torch.eye(2).to_sparse().requires_grad_()
    assert enter(leaf) is leaf
