import pytest
import torch

from pipework import torch_private
from pipework.autograd.boundary import (
    cut,
    enter,
    gradients,
    is_unchangeable,
    mark_unchangeable,
    private_copy,
    renewed,
)

LAYOUTS = {
    "usual": lambda: torch.randn(4, 6),
    "transposed": lambda: torch.randn(6, 4).t(),
    "with gaps": lambda: torch.randn(4, 13)[:, 1::2],
    "expanded": lambda: torch.randn(6).expand(4, 6),
    "overlapping": lambda: torch.randn(9).unfold(0, 6, 1),
    "shifted": lambda: torch.randn(25)[1:].view(4, 6),
    "channels last": lambda: torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "one row": lambda: torch.randn(6, 1).t(),
    "one column": lambda: torch.randn(4, 9)[:, :1],
    "empty": lambda: torch.randn(0, 3),
    "scalar": lambda: torch.randn(()),
}


def test_what_needs_no_gradient_or_is_sparse_enters_as_it_is() -> None:
    x, sparse = torch.ones(2), torch.eye(2).to_sparse().requires_grad_()
    assert enter(x) is x
    assert not cut(x).requires_grad
    assert enter(sparse) is sparse


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_private_copy_has_strides_and_alignment_of_the_leaf(layout: str) -> None:
    leaf = LAYOUTS[layout]().requires_grad_()
    copy = private_copy(leaf)
    assert torch.equal(copy, leaf)
    assert copy.stride() == leaf.stride()
    assert (copy.data_ptr() - leaf.data_ptr()) % torch_private.ALIGNMENT == 0
    assert copy.is_leaf
    assert copy.requires_grad
    assert not leaf.numel() or copy.untyped_storage().data_ptr() != leaf.untyped_storage().data_ptr()
    assert not private_copy(leaf.detach()).requires_grad


@pytest.mark.parametrize("make", [renewed, private_copy])
def test_a_leaf_for_another_pass_has_no_hooks_and_the_same_mark(make: object) -> None:
    leaf = torch.randn(3, requires_grad=True)
    leaf.register_hook(lambda gradient: 2 * gradient)
    assert not is_unchangeable(make(leaf))
    mark_unchangeable(leaf)
    again = make(leaf)
    assert is_unchangeable(again)
    again.sum().backward()
    assert torch.equal(again.grad, torch.ones(3))
    assert not make(leaf.detach()).requires_grad


class Passes(torch.autograd.Function):
    """Hands a gradient on as it comes."""

    @staticmethod
    def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: object, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


@pytest.mark.parametrize("entered", [False, True])
@pytest.mark.parametrize("of_gradient", [name for name in LAYOUTS if name not in ("empty", "scalar")])
@pytest.mark.parametrize("of_leaf", ["usual", "transposed", "with gaps", "expanded"])
def test_a_gradient_is_what_autograd_made(of_leaf: str, of_gradient: str, entered: bool) -> None:
    made = LAYOUTS[of_gradient]()
    leaf = LAYOUTS[of_leaf]()
    leaf = (leaf if leaf.shape == made.shape else torch.randn(made.shape)).requires_grad_()
    output = Passes.apply(enter(leaf) if entered else leaf)
    for _ in range(2):  # the graph is retained
        (gradient,) = gradients([leaf], torch.autograd.backward, output, made, True)
        assert torch.equal(gradient, made)
        assert gradient.stride() == made.stride()
        assert leaf.grad is None
        assert not leaf._backward_hooks


def test_no_copy_of_a_gradient_is_made() -> None:
    made = torch.randn(4, 6).t()
    leaf = torch.randn(6, 4, requires_grad=True)
    output = Passes.apply(leaf)
    (gradient,) = gradients([leaf], torch.autograd.backward, output, made)
    assert gradient.data_ptr() == made.data_ptr()


class Differentiates(torch.autograd.Function):
    """Differentiates its input's part of the graph once more in its backward."""

    @staticmethod
    def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x.detach() ** 2

    @staticmethod
    def backward(ctx: object, gradient: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        with torch.enable_grad():
            y = (x.t() ** 2).t()
        (found,) = torch.autograd.grad(y, x, gradient)
        return found


@pytest.mark.parametrize("strides", [(1, 3), (3, 1), (0, 0)])
def test_what_a_layer_differentiates_meanwhile_is_not_taken(strides: tuple[int, int]) -> None:
    leaf = torch.randn(3, 3, requires_grad=True)
    made = torch.ones(9).as_strided((3, 3), strides)
    (gradient,) = gradients([leaf], torch.autograd.backward, Differentiates.apply(leaf), made)
    assert torch.equal(gradient, 2 * leaf)


def test_a_failed_backward_leaves_no_hook() -> None:
    leaf = torch.randn(3, requires_grad=True)

    def fail() -> None:
        raise RuntimeError("no gradient")

    with pytest.raises(RuntimeError, match="no gradient"):
        gradients([leaf], fail)
    assert not leaf._backward_hooks


def test_a_sparse_gradient_stays_sparse() -> None:
    leaf = torch.randn(5, 2, requires_grad=True)
    output = torch.nn.functional.embedding(torch.tensor([1, 3]), leaf, sparse=True)
    (gradient,) = gradients([leaf], output.sum().backward)
    assert gradient.is_sparse
