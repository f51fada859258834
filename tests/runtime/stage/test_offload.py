import pytest
import torch
from torch import Tensor, nn

from pipework.runtime.stage.offload import SavedTensors, movable

CPU = torch.device("cpu")


def bytes_of(saved: SavedTensors) -> list[int]:
    return sorted(each.storage.nbytes() for each in saved.moving() if each.storage is not None)


def test_what_nothing_else_uses_moves_each_storage_once() -> None:
    weight, x, saved = nn.Parameter(torch.ones(4, 4)), torch.ones(2, 4), SavedTensors(CPU)
    with saved.saving():
        y = (x @ weight).tanh()
        z = y[:, 1:].exp() * y.sum()
        (x * weight.sum()).exp()  # its graph is gone at once
    assert bytes_of(saved) == [4, 24]  # `sum` and `exp`; x, the weight and y are in use
    del y
    assert bytes_of(saved) == [4, 24, 32]
    z.sum().backward()
    assert bytes_of(saved) == []


def test_a_saved_tensor_is_as_it_was_and_its_version_is_checked() -> None:
    x, saved = torch.rand(4, 6, dtype=torch.complex64, requires_grad=True), SavedTensors(CPU)
    y = (x.t() * 2).conj()
    with saved.saving():
        z = y[1:, ::2].square()
    (memory,) = [*saved._memories.values()]
    got = z.grad_fn._saved_self
    assert (got.stride(), got.storage_offset(), got.is_conj()) == (y[1:, ::2].stride(), y[1:].storage_offset(), True)
    assert got.data_ptr() == y[1:].data_ptr()
    assert torch.equal(got, y[1:, ::2])
    memory.storage, storage = None, memory.storage
    with pytest.raises(RuntimeError, match=r"shape \(5, 2\) .* is in host memory \(offload=\), and is needed before"):
        z.sum().abs().backward()
    memory.storage = storage
    y.detach().zero_()
    with pytest.raises(RuntimeError, match=r"shape \(5, 2\) is at version 1; expected version 0"):
        z.sum().abs().backward()


@pytest.mark.parametrize(
    "tensor",
    [
        torch.ones(3).to_sparse(),
        torch.ones(0, 3),
        torch.ones(3, device="meta"),
        torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
        torch.ones(2).as_subclass(type("Own", (Tensor,), {})),
        torch.frombuffer(bytearray(9), dtype=torch.uint8, offset=1),
    ],
    ids=["sparse", "empty", "meta", "nested", "subclass", "foreign"],
)
def test_others_stay(tensor: Tensor) -> None:
    assert movable(tensor, CPU) is None
    assert movable(torch.ones(2)[1:], CPU) is not None
