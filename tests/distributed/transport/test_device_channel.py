"""Transfers without tags, in order, with gloo in place of NCCL."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch.distributed import HashStore

from pipework.distributed.transport.device_channel import DeviceChannel
from pipework.distributed.transport.groups import group_of
from pipework.values.tensor_form import TensorForm
from tests.nccl_stand_in import NcclStandIn


@pytest.fixture
def pair() -> list[DeviceChannel]:
    store = HashStore()

    def end(rank: int) -> DeviceChannel:
        up, down = (NcclStandIn(group_of(store, name, (0, 1), rank)) for name in ("up", "down"))
        return DeviceChannel(*((up, down) if rank == 0 else (down, up)), torch.device("cpu"))

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(end, range(2)))


def test_tensors_arrive_in_the_order_in_which_they_are_sent(pair: list[DeviceChannel]) -> None:
    tensors = [torch.randn(3, 4), torch.arange(5), torch.randn(2, dtype=torch.complex64)]
    forms = [TensorForm(each.dtype, tuple(each.shape), False) for each in tensors]
    for sender, receiver in (pair, pair[::-1]):
        memories = [each.reshape(-1).view(torch.uint8) for each in tensors]
        works = [sender.send(memories[:2]), sender.send(memories[2:])]
        received = receiver.receive(forms[:2]) + receiver.receive(forms[2:])
        for one, two in zip(received, tensors, strict=True):
            assert torch.equal(one, two)
        for work in works:
            work.wait()


def test_an_empty_tensor_is_not_transferred(pair: list[DeviceChannel]) -> None:
    (received,) = pair[1].receive([TensorForm(torch.float32, (0, 3), False)])
    assert received.shape == (0, 3)


def test_both_sides_connect_at_the_same_time(pair: list[DeviceChannel]) -> None:
    with ThreadPoolExecutor(2) as pool:
        for each in [pool.submit(channel.connect) for channel in pair]:
            each.result(10)
