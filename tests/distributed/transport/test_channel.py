"""Channels between two ranks, which are two threads here."""

import itertools
import threading

import pytest
import torch
from torch import Tensor
from torch.distributed import HashStore

from pipework.distributed.transport.channel import Channel, DeviceChannel
from pipework.distributed.transport.groups import LostConnectionError, group_of
from pipework.values import tensor_form
from tests.helpers import in_threads
from tests.nccl_stand_in import NcclStandIn

ADDRESSES = [("F", 1, 0), ("F skip 0", 3, 0), ("F", 1, 1)]
MESSAGES: dict[str, list[tuple[Tensor | None, ...]]] = {
    "small": [(torch.arange(3.0),), (torch.arange(3.0),), (torch.arange(3.0),)],
    "large": [(torch.rand(200, 300),), (torch.rand(200, 300),), (torch.rand(300, 200).t(),)],
    "changing": [(torch.rand(200, 300),), (torch.rand(7, 3),), (torch.rand(300, 300).half(), None, torch.rand(0, 2))],
    "several": [(torch.rand(2), torch.arange(70000), None, torch.rand(3, 4)), (), (torch.rand(2), None)],
    "needs gradients": [(torch.rand(2, requires_grad=True),), (torch.rand(50000, requires_grad=True),), (None,)],
}


@pytest.fixture(scope="module")
def made() -> list[list[Channel]]:
    """Channels of this file. Where gloo ends a group while it connects another one, it may close a wrong connection."""
    return []


@pytest.fixture(params=["through the CPU", "device_channel"])
def pair(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, made: list[list[Channel]]) -> list[Channel]:
    """Both sides; tensors of float32 are taken to be on accelerators, with gloo's ways in place of NCCL's."""
    store, sides = HashStore(), [None, None]
    made.append(sides)
    device_channel = request.param == "device_channel"
    if device_channel:
        monkeypatch.setattr(tensor_form, "lies_on_accelerator", lambda tensor: tensor.dtype is torch.float32)

    def join(rank: int) -> None:
        cpu, there = torch.device("cpu"), None
        up, down = (group_of(store, name, (0, 1), rank) for name in ("up", "down"))
        if device_channel:
            ways = [NcclStandIn(group_of(store, name, (0, 1), rank)) for name in ("up there", "down there")]
            there = DeviceChannel(*(ways if rank == 0 else ways[::-1]), cpu)
        sides[rank] = Channel(1 - rank, *((up, down) if rank == 0 else (down, up)), cpu, there)

    in_threads(lambda: join(0), lambda: join(1))
    return sides


@pytest.mark.parametrize("kinds", list(itertools.permutations(MESSAGES, 3))[::7], ids="-".join)
def test_whatever_is_sent_arrives(pair: list[Channel], kinds: tuple[str, ...]) -> None:
    sender, receiver = pair
    rounds = [messages for kind in kinds for messages in [MESSAGES[kind]] * 2]  # each twice: as expected, too

    def send() -> None:
        for number, messages in enumerate(rounds):
            for address, tensors in zip(ADDRESSES, messages, strict=True):
                sender.send(address, tensors, number % 2)
        sender.flush()

    def receive() -> None:
        for number, messages in enumerate(rounds):
            for address in ADDRESSES:
                receiver.post(address)
            for address, expected in reversed(list(zip(ADDRESSES, messages, strict=True))):  # in another order
                tensors, around = receiver.take(address)
                assert around == number % 2
                for actual, wanted in zip(tensors, expected, strict=True):
                    assert (actual is None) == (wanted is None)
                    if actual is not None:
                        torch.testing.assert_close(actual, wanted, rtol=0, atol=0)
                        assert (actual.requires_grad, actual.dtype) == (wanted.requires_grad, wanted.dtype)
                        assert actual.stride() == wanted.stride()

    in_threads(send, receive)


def test_a_wait_ends_when_the_channel_is_aborted(pair: list[Channel]) -> None:
    channel = pair[0]
    channel.post(ADDRESSES[0])

    def wait() -> None:
        with pytest.raises(LostConnectionError, match="rank 1"):
            channel.take(ADDRESSES[0])

    timer = threading.Timer(0.3, channel.abort)
    timer.start()
    in_threads(wait)
    timer.join()
