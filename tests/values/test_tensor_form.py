import pytest
import torch
from torch import Tensor

from pipework.torch_private import ALIGNMENT
from pipework.values.tensor_form import copied

TENSORS = {
    "usual": torch.rand(3, 4),
    "transposed": torch.rand(3, 4).t(),
    "a slice of a wider one": torch.rand(6, 8)[1:4, 2:5],
    "unaligned": torch.rand(13)[1:],
    "an unaligned matrix": torch.rand(13)[1:].view(3, 4),
    "every second": torch.rand(4, 6)[:, ::2],
    "expanded": torch.rand(3, 1).expand(3, 4),
    "overlapping": torch.rand(10).unfold(0, 4, 2),
    "channels last": torch.rand(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "empty": torch.rand(0, 3),
    "integers": torch.arange(12).view(3, 4)[:, 1:],
    "a number": torch.rand(5)[3],
}


def same_place(copy: Tensor, tensor: Tensor) -> None:
    assert torch.equal(copy.cpu(), tensor)
    assert copy.stride() == tensor.stride() or not tensor.numel()
    assert copy.data_ptr() % ALIGNMENT == tensor.data_ptr() % ALIGNMENT


@pytest.mark.gpu
@pytest.mark.parametrize("name", TENSORS)
def test_a_copy_lies_as_the_tensor_does(name: str) -> None:
    gpu, tensor = torch.accelerator.current_accelerator(), TENSORS[name]
    first = torch.device(gpu.type, 0)
    there = copied(tensor, first)
    same_place(there, tensor)
    last = torch.device(gpu.type, torch.accelerator.device_count() - 1)
    further = copied(there, last) if last != first else there
    same_place(further, tensor)
    back = copied(further, torch.device("cpu"))
    torch.accelerator.synchronize(further.device)
    same_place(back, tensor)


@pytest.mark.gpu
def test_what_has_no_strides_is_copied_as_it_is() -> None:
    gpu, parameter = torch.accelerator.current_accelerator(), torch.nn.Parameter(torch.rand(3, 4).t())
    assert copied(parameter, gpu).stride() == parameter.stride()
