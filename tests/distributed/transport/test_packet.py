"""Packets, and the messages that travel in them: what comes out is what went in, with memory of its own."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed import HashStore

from pipework.distributed.transport.channel import Channel
from pipework.distributed.transport.groups import group_of
from pipework.distributed.transport.packet import Packet, Packets, fits_in_packet
from pipework.values.tensor_form import TensorForm

LARGE = 2**15  # numbers, more than what is copied into a packet
ADDRESS = ("F", 1, 0)


@pytest.fixture
def ends() -> Iterator[list[Channel]]:
    store = HashStore()

    def end(rank: int) -> Channel:
        up, down = (group_of(store, name, (0, 1), rank) for name in ("up", "down"))
        return Channel(1 - rank, *((up, down) if rank == 0 else (down, up)), torch.device("cpu"))

    with ThreadPoolExecutor(2) as pool:
        yield list(pool.map(end, range(2)))


def passed(ends: list[Channel], tensors: Any, around: Any = None, *, back: bool = False) -> tuple[Any, Any]:
    sender, receiver = reversed(ends) if back else ends
    receiver.post(ADDRESS)
    sender.send(ADDRESS, tensors, around)
    return receiver.take(ADDRESS)


def same(got: Tensor | None, wanted: Tensor | None) -> bool:
    if got is None or wanted is None:
        return got is wanted
    return (
        torch.equal(got, wanted)
        and got.dtype == wanted.dtype
        and got.requires_grad == wanted.requires_grad
        and (got.grad_fn is None and got._version == 0)
    )


MESSAGES: dict[str, tuple[Tensor | None, ...]] = {
    "small": (torch.randn(3, 4),),
    "small with a gradient": (torch.randn(3, 4, requires_grad=True),),
    "inside of a graph": (torch.randn(3, 4, requires_grad=True) * 2,),
    "of another shape": (torch.randn(5, 4),),
    "several": (torch.randn(7), None, torch.arange(5), torch.tensor(True), torch.zeros(0, 3), torch.tensor(1.5)),
    "complex": (torch.randn(3, dtype=torch.complex128), torch.ones(1, dtype=torch.uint8)),
    "conjugate": (torch.randn(3, dtype=torch.complex64).conj(),),
    "brain": (torch.randn(3).bfloat16(), torch.randn(5).half(), torch.randn(2).to(torch.float8_e4m3fn)),
    "part of a larger one": (torch.randn(6, 8)[::2, 1::3],),
    "nothing": (),
    "missing": (None, None),
    "empty": (torch.zeros(0),),
    "large": (torch.randn(LARGE),),
    "large and small": (torch.randn(2), torch.randn(LARGE), None, torch.randn(3)),
    "large of another shape": (torch.randn(LARGE + 1), torch.randn(LARGE)),
}


@pytest.mark.parametrize("first", MESSAGES)
@pytest.mark.thorough
def test_every_message_comes_after_every_other_one(ends: list[Channel], first: str) -> None:
    for name in MESSAGES:
        for _ in range(2):
            for tensors in (MESSAGES[first], MESSAGES[name], MESSAGES[name]):
                got, around = passed(ends, tensors)
                assert around is None
                assert len(got) == len(tensors)
                assert all(map(same, got, tensors)), name


def test_what_comes_has_memory_of_its_own(ends: list[Channel]) -> None:
    tensors = (torch.randn(3), torch.randn(3))
    every = [tensor for _ in range(4) for tensor in passed(ends, tensors)[0]]
    assert len({tensor.untyped_storage().data_ptr() for tensor in every}) == len(every)
    kept = every[-1].clone()
    every[-2].zero_()
    passed(ends, tensors)
    assert torch.equal(every[-1], kept)
    assert every[-1]._version == 0


def test_what_was_sent_may_be_overwritten_once_it_is_in_a_packet(ends: list[Channel]) -> None:
    value = torch.zeros(3)
    passed(ends, (value,))
    ends[1].post(ADDRESS)
    ends[0].send(ADDRESS, (value,), None)
    value += 1
    (got,), _ = ends[1].take(ADDRESS)
    assert same(got, torch.zeros(3))


def test_what_stands_around_may_change_while_the_tensors_do_not(ends: list[Channel]) -> None:
    for around in (None, 1, 1, 2, None, 2):
        assert passed(ends, (torch.ones(2),), around)[1] == around


@pytest.mark.parametrize("modes", [(torch.inference_mode, torch.no_grad), (torch.no_grad, torch.inference_mode)])
def test_packets_serve_every_mode(ends: list[Channel], modes: Any) -> None:
    for mode in (*modes, *modes):
        with mode():
            value = torch.randn(3)
            for _ in range(2):
                (got,), _ = passed(ends, (value,))
                assert torch.equal(got, value)


def test_messages_that_are_posted_ahead_come_in_any_order_of_addresses(ends: list[Channel]) -> None:
    for _ in range(3):
        addresses = [("F", 1, micro_batch) for micro_batch in range(5)]
        for address in addresses:
            ends[1].post(address)
        for n, address in enumerate(addresses):
            ends[0].send(address, (torch.full((2,), float(n)),), None)
        for n, address in reversed(list(enumerate(addresses))):
            (got,), _ = ends[1].take(address)
            assert same(got, torch.full((2,), float(n)))


def test_what_has_arrived_is_kept_no_longer(ends: list[Channel]) -> None:
    for _ in range(5):
        passed(ends, (torch.randn(LARGE),))
        passed(ends, (torch.randn(2),), back=True)
    assert len(ends[0]._kept) == 0
    assert len(ends[1]._kept) == 1  # nothing has come back since


def test_a_packet_that_was_given_back_is_used_again() -> None:
    packets = Packets([TensorForm(torch.float32, (2,), False)])
    first, second = packets.get(), packets.get()
    assert first is not second
    packets.give_back(first)
    assert packets.get() is first


def test_a_packet_holds_numbers_and_tensors() -> None:
    forms = [TensorForm(torch.bool, (3,), False), None, TensorForm(torch.complex128, (1, 2), False)]
    tensors = [torch.tensor([True, False, True]), None, torch.tensor([[1 + 2j, 3]], dtype=torch.complex128)]
    packet, other = Packet(forms), Packet(forms)
    packet.numbers[:] = [1, -2, 3, 2**62]
    packet.put(tensors)
    other.memory.copy_(packet.memory)
    assert list(other.numbers) == [1, -2, 3, 2**62]
    assert all(map(same, other.tensors(), tensors))


def test_only_small_tensors_of_usual_types_go_into_packets() -> None:
    assert fits_in_packet([None, TensorForm(torch.int64, (2,), False), TensorForm(torch.float32, (0, 10**9), False)])
    assert not fits_in_packet([TensorForm(torch.float32, (LARGE,), False)])
    assert not fits_in_packet([TensorForm(torch.uint4, (2,), False)])
    assert not fits_in_packet([TensorForm(torch.quint8, (2,), False)])
