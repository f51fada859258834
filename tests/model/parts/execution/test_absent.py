import pytest
import torch

from pipework.model.parts.execution.absent import Absent


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
def test_a_tensor_in_place_of_one_that_is_absent(dtype: torch.dtype) -> None:
    tensor = Absent.of(torch.ones(3, 5, dtype=dtype)).tensor(torch.device("cpu"))
    assert (tensor.shape, tensor.dtype) == ((3, 5), dtype)
    assert tensor.untyped_storage().nbytes() == dtype.itemsize
    assert tensor.isnan().all() == dtype.is_floating_point
