"""Bytes of tensors."""

import warnings

import pytest
import torch
from torch import Tensor, nn
from torch.testing._internal.two_tensor import TwoTensor

from pipework.distributed.gradients.data_parallel import as_bytes, write_bytes


class Marked(Tensor):
    """A class of its own for an array like any other."""


@pytest.mark.parametrize("make", [Tensor, nn.Parameter, lambda data: data.as_subclass(Marked)])
def test_memory_in_the_usual_order_is_not_copied(make: object) -> None:
    assert callable(make)
    given = make(torch.randn(2, 3))
    data = as_bytes("x", given)
    assert data.data_ptr() == given.data_ptr()
    assert type(data) is Tensor
    write_bytes(data, given)
    data.zero_()
    assert not given.any()


def test_what_is_no_array_is_refused_by_name() -> None:
    with pytest.raises(TypeError, match=r"0.edges has the layout torch.sparse_coo, so its values"):
        as_bytes("0.edges", torch.eye(3).to_sparse())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        quantized = torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.quint8)
    with pytest.raises(TypeError, match=r"x is quantized, torch\.quint8"):
        as_bytes("x", quantized)
    with pytest.raises(TypeError, match="x is a TwoTensor, which stands for other tensors"):
        as_bytes("x", TwoTensor(torch.ones(2), torch.ones(2)))
