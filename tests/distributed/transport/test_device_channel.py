"""Transfers without tags, in order, with gloo in place of NCCL."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch.distributed import HashStore

from pipework.distributed.mesh import group_of
from pipework.distributed.transport.device_channel import DeviceChannel
from pipework.values.tensor_form import TensorForm


@pytest.fixture
def pair() -> list[DeviceChannel]:
    store = HashStore()

    def end(rank: int) -> DeviceChannel:
        up, down = (group_of(store, name, (0, 1), rank) for name in ("up", "down"))
        return DeviceChannel(*((up, down) if rank == 0 else (down, up)), torch.device("cpu"))

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(end, range(2)))


def test_tensors_arrive_in_the_order_in_which_they_are_sent(pair: list[DeviceChannel]) -> None:
    tensors = [torch.randn(3, 4), torch.arange(5), torch.randn(2, dtype=torch.complex64)]
    forms = [TensorForm(each.dtype, tuple(each.shape), False) for each in tensors]
    for sender, receiver in (pair, pair[::-1]):
        works = [sender.send(each.reshape(-1).view(torch.uint8)) for each in tensors]
        for tensor, form in zip(tensors, forms, strict=True):
            assert torch.equal(receiver.receive(form), tensor)
        for work in works:
            work.wait()


def test_an_empty_tensor_is_not_transferred(pair: list[DeviceChannel]) -> None:
    assert pair[1].receive(TensorForm(torch.float32, (0, 3), False)).shape == (0, 3)
