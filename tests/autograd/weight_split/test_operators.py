"""Each operator that can put gradients off gives autograd's bits, and really puts them off."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from tests.autograd.weight_split.harness import Layer, check

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
SHAPES = ((4,), (5, 4), (1, 4), (0, 4), (3, 5, 4), (1, 5, 4), (5, 1, 4), (3, 1, 1, 4), (2, 3, 5, 4), (5, 1), (33, 64))
BOTH = (True, False)

every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype)[6:])
grad_or_not = pytest.mark.parametrize("grad", BOTH, ids=["grad", "no grad"])


def of(shape: Sequence[int], dtype: torch.dtype, grad: bool = True, *, transposed: bool = False) -> Tensor:
    """A random leaf; transposed: as `x.transpose(0, 1)` lies."""
    if transposed:
        shape = (shape[1], shape[0], *shape[2:])
    x = torch.randn(*shape, dtype=torch.float64).to(dtype)
    return (x.transpose(0, 1) if transposed else x).requires_grad_(grad)


def three(make: Callable[[], Tensor]) -> list[list[Tensor]]:
    return [[make()] for _ in range(3)]


@every_dtype
@grad_or_not
@pytest.mark.parametrize("transposed", BOTH, ids=["transposed", "contiguous"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_products_with_a_matrix(shape: tuple[int, ...], transposed: bool, grad: bool, dtype: torch.dtype) -> None:
    if transposed and len(shape) < 2:
        return
    batches = three(lambda: of(shape, dtype, grad, transposed=transposed))
    for width in (1, 3, 16):
        weight, bias = of((width, shape[-1]), dtype), of((width,), dtype)
        check(lambda w, x: F.linear(x, w), [weight], batches, waits=True)
        check(lambda w, b, x: F.linear(x, w, b), [weight, bias], batches, waits=True)
        check(lambda w, b, x: F.linear(x, w, b), [weight, bias.detach()], batches, waits=True)
        factor = of((shape[-1], width), dtype)
        check(lambda w, x: x @ w, [factor], batches, waits=True)
        if len(shape) == 2:
            check(lambda w, b, x: torch.addmm(b, x, w), [factor, bias], batches, waits=True)
            check(lambda w, b, x: torch.addmm(b, x, w, beta=0.5, alpha=2), [factor, bias], batches, waits=True)
            matrix = of((shape[0], width), dtype)
            check(lambda w, b, x: torch.addmm(b, x, w), [factor, matrix], batches, waits=True)


PRODUCTS: dict[str, Layer] = {
    "torch.matmul": lambda w, x: torch.matmul(x, w),
    "torch.matmul by keyword": lambda w, x: torch.matmul(input=x, other=w),
    "torch.mm": lambda w, x: torch.mm(x, w),
    "torch.mm by keyword": lambda w, x: torch.mm(x, mat2=w),
    "@": lambda w, x: x @ w,
    "Tensor.matmul": lambda w, x: x.matmul(w),
    "Tensor.mm": lambda w, x: x.mm(w),
    "from the left": lambda w, x: w @ x.t(),
    "linear by keyword": lambda w, x: F.linear(weight=w, input=x[:, :1].expand(-1, 4)),
    "of itself": lambda w, x: torch.mm(w, w) + x.sum(),
    "einsum of two": lambda w, x: torch.einsum("bi,ij->bj", x, w),
    "einsum of a list": lambda w, x: torch.einsum("bi,ij->bj", [x, w]),
    "einsum of three": lambda w, x: torch.einsum("bi,ij,jk->bk", x, w, w),
    "einsum of the same": lambda w, x: torch.einsum("bi,bi,ij->bj", x, x, w),
}


@every_dtype
@grad_or_not
@pytest.mark.parametrize("how", PRODUCTS)
def test_ways_to_multiply(how: str, grad: bool, dtype: torch.dtype) -> None:
    batches = three(lambda: of((5, 4), dtype, grad))
    check(PRODUCTS[how], [of((4, 4), dtype)], batches, waits=True)
    check(PRODUCTS[how], [of((4, 4), dtype, transposed=True)], batches, waits=True)


BATCHED: dict[str, Layer] = {
    "torch.bmm": lambda w, b, x: torch.bmm(x, w) + b.detach(),
    "Tensor.bmm": lambda w, b, x: x.bmm(w) + b.detach(),
    "matmul": lambda w, b, x: x @ w + b.detach(),
    "einsum": lambda w, b, x: torch.einsum("eni,eij->enj", x, w),
    "torch.baddbmm": lambda w, b, x: torch.baddbmm(b, x, w),
    "Tensor.baddbmm": lambda w, b, x: b.baddbmm(x, w, beta=2, alpha=0.5),
}


@every_dtype
@grad_or_not
@pytest.mark.parametrize("how", BATCHED)
def test_batched_products(how: str, grad: bool, dtype: torch.dtype) -> None:
    batches = three(lambda: of((2, 3, 4), dtype, grad))
    waits = [True, True if "badd" in how else None]
    check(BATCHED[how], [of((2, 4, 5), dtype), of((2, 1, 5), dtype)], batches, waits=waits)


GEOMETRIES: tuple[dict[str, Any], ...] = (
    {},
    {"stride": 2, "padding": 1},
    {"stride": (2,), "padding": [1]},
    {"dilation": 2, "padding": 2},
    {"groups": 2},
    {"padding": 1, "groups": 4},
    {"padding": "same"},
    {"padding": "same", "dilation": 2},
)


@every_dtype
@grad_or_not
@pytest.mark.parametrize("geometry", GEOMETRIES, ids=str)
@pytest.mark.parametrize("dimensions", [1, 2, 3])
def test_convolutions(dimensions: int, geometry: dict[str, Any], grad: bool, dtype: torch.dtype) -> None:
    convolution = getattr(F, f"conv{dimensions}d")
    groups = geometry.get("groups", 1)
    for rows, kernel, transposed in ((3, 3, False), (1, 3, True), (0, 3, False), (3, 1, True)):
        size = [6, 5, 4][:dimensions]
        if isinstance(geometry.get("stride"), tuple):
            geometry = {"stride": (2,) * dimensions, "padding": [1] * dimensions}
        batches = three(lambda: of((rows, 4, *size), dtype, grad, transposed=transposed))  # noqa: B023
        weight, bias = of((8, 4 // groups, *[kernel] * dimensions), dtype), of((8,), dtype)
        check(lambda w, x: convolution(x, w, **geometry), [weight], batches, waits=True)  # noqa: B023
        check(lambda w, b, x: convolution(x, w, b, **geometry), [weight, bias], batches, waits=True)  # noqa: B023
        check(lambda w, b, x: convolution(x, w, b, **geometry), [weight, bias.detach()], batches, waits=True)  # noqa: B023
    image = of((4, *size), dtype, grad)
    check(lambda w, b, x: convolution(x, w, b, **geometry), [weight, bias], three(lambda: image), waits=True)


@every_dtype
@grad_or_not
@pytest.mark.parametrize(
    "geometry",
    [
        {},
        {"stride": 2, "padding": 1, "output_padding": 1},
        {"dilation": 2, "padding": 2},
        {"groups": 2},
        {"stride": 3, "output_padding": 2, "groups": 4},
    ],
    ids=str,
)
@pytest.mark.parametrize("dimensions", [1, 2, 3])
def test_transposed_convolutions(dimensions: int, geometry: dict[str, Any], grad: bool, dtype: torch.dtype) -> None:
    convolution = getattr(F, f"conv_transpose{dimensions}d")
    groups = geometry.get("groups", 1)
    for rows, kernel in ((3, 3), (1, 3), (3, 1) if "padding" not in geometry else (3, 2)):
        batches = three(lambda: of((rows, 4, *[5, 4, 4][:dimensions]), dtype, grad))  # noqa: B023
        weight, bias = of((4, 8 // groups, *[kernel] * dimensions), dtype), of((8,), dtype)
        check(lambda w, x: convolution(x, w, **geometry), [weight], batches, waits=True)
        check(lambda w, b, x: convolution(x, w, b, **geometry), [weight, bias], batches, waits=True)


@every_dtype
@pytest.mark.parametrize("by_frequency", BOTH)
@pytest.mark.parametrize("padding", [None, 0, 3, -1, -7])
@pytest.mark.parametrize("shape", [(5,), (3, 9), (0,), (2, 3, 4), ()], ids=str)
def test_embeddings(shape: tuple[int, ...], padding: int | None, by_frequency: bool, dtype: torch.dtype) -> None:
    def layer(weight: Tensor, indices: Tensor) -> Tensor:
        return F.embedding(indices, weight, padding, scale_grad_by_freq=by_frequency)

    batches = three(lambda: torch.randint(0, 7, shape))
    check(layer, [of((7, 3), dtype)], batches, waits=True)
    check(layer, [of((7, 1), dtype)], batches, waits=True)


WHOLE: dict[str, tuple[Layer, tuple[int, ...]]] = {
    "a bias alone": (lambda b, x: F.linear(x, torch.ones(4, 4, dtype=x.dtype), b), (4,)),
    "a vector": (lambda v, x: x @ v, (4,)),
    "another view": (lambda w, x: x @ w.t(), (4, 4)),
    "with numbers": (lambda w, x: x * w, (5, 4)),
    "renormalized": (lambda w, x: F.embedding(x[:, 0].long().abs() % 5, w.clone(), max_norm=1.0), (5, 4)),
    "two outputs": (lambda w, x: torch.cat(torch.unbind(w)) + x.sum(), (5, 4)),
    "into an argument": (lambda w, x: (x * 1).addmm_(x, w), (4, 4)),
}


@every_dtype
@grad_or_not
@pytest.mark.parametrize("how", WHOLE)
def test_what_is_not_put_off(how: str, grad: bool, dtype: torch.dtype) -> None:
    layer, shape = WHOLE[how]
    check(layer, [of(shape, dtype)], three(lambda: of((5, 4), dtype, grad)), waits=False)
