import pytest
import torch
from torch import Tensor

from pipework.autograd.factor import Factor


def device_of(kind: str) -> torch.device:
    found = torch.accelerator.current_accelerator()
    return torch.device(found.type, 0) if kind == "accelerator" and found is not None else torch.device("cpu")


KINDS = ["cpu", pytest.param("accelerator", marks=pytest.mark.gpu)]
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.complex64]


def gradients(dtype: torch.dtype, device: torch.device) -> list[Tensor | None]:
    strided = [torch.randn(7, 3, dtype=dtype), torch.randn(4, dtype=dtype)]
    return [strided[0].to(device).t(), None, strided[1].to(device)]


def values(tensors: list[Tensor | None]) -> list[Tensor | None]:
    return [None if tensor is None else tensor.cpu() for tensor in tensors]


def same(actual: list[Tensor | None], expected: list[Tensor | None]) -> None:
    for one, two in zip(actual, expected, strict=True):
        assert (one is None) == (two is None)
        if one is not None:
            assert two is not None
            assert one.dtype is two.dtype
            assert torch.equal(one, two)


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_factor_on_any_device_gives_the_bits_of_a_number(kind: str, dtype: torch.dtype, keep: bool) -> None:
    device = device_of(kind)
    given = gradients(dtype, device)
    before, factor = values(given), torch.tensor(1 / 3)
    expected = [None if gradient is None else gradient * float(factor) for gradient in before]
    result = Factor.of(factor.to(device), 1.0).times(given, keep=keep)
    same(values(result), expected)
    same(values(given), before if keep or (dtype is torch.complex64 and kind != "cpu") else expected)
    assert [None if gradient is None else gradient.stride() for gradient in result] == [(1, 3), None, (1,)]


@pytest.mark.parametrize("kind", KINDS)
def test_the_scale_is_divided_out(kind: str) -> None:
    device = device_of(kind)
    factor = Factor.of(torch.tensor(6.0, dtype=torch.float16, device=device), 4.0)
    (result,) = factor.times([torch.ones(2, device=device)], keep=True)
    assert result is not None
    assert result.tolist() == [1.5, 1.5]


def test_one_leaves_the_gradients_themselves() -> None:
    own = torch.ones(2)
    factor = Factor.of(torch.tensor(2.0), 2.0)
    assert factor.is_one
    assert factor.times([own], keep=False)[0] is own
    assert factor.times([own], keep=True)[0] is not own
    assert Factor.of(torch.ones((), device="meta"), 1.0).is_one  # without values


@pytest.mark.gpu
def test_a_stage_on_the_cpu_gets_the_number() -> None:
    device = device_of("accelerator")
    factor = Factor.of(torch.tensor(0.5, device=device), 1.0)
    result = factor.times([torch.ones(2), torch.ones(2, device=device), None], keep=False)
    same(values(result), [torch.full((2,), 0.5), torch.full((2,), 0.5), None])
