import pytest
import torch

from pipework.runtime.boundary import Enter, cut, enter


def test_enter_is_differentiable() -> None:
    assert torch.autograd.gradcheck(Enter.apply, torch.randn(3, 2, dtype=torch.float64, requires_grad=True))


def test_what_enters_shares_memory_and_version_and_may_be_overwritten() -> None:
    leaf = cut(torch.ones(3, requires_grad=True) * 2)
    alias = enter(leaf)
    assert alias.data_ptr() == leaf.data_ptr()
    alias.mul_(3)
    assert leaf._version == alias._version == 1
    alias.sum().backward()
    assert torch.equal(leaf.grad, torch.full((3,), 3.0))


def test_a_sender_that_saved_the_tensor_notices_that_it_was_overwritten() -> None:
    x = torch.randn(3, requires_grad=True)
    sent = x.sigmoid()
    enter(cut(sent)).relu_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        sent.sum().backward()


def test_a_tensor_without_gradient_enters_as_it_is() -> None:
    x = torch.ones(2)
    assert enter(x) is x
    assert not cut(x).requires_grad
