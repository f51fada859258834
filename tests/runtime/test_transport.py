import threading

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pipework.runtime.failure import Stopped
from pipework.runtime.transport import LocalTransport


def test_messages_follow_their_addresses() -> None:
    transport = LocalTransport((0, 1), {})
    tensor = torch.zeros(1)
    transport.outside.sender("F", 0)(7, (tensor,), None)
    assert transport.endpoints[0].receive(("F", 0, 7))[0] == (tensor,)
    transport.endpoints[0].sender("F", 1)(7, (tensor,), None)
    assert transport.endpoints[1].receive(("F", 1, 7))[0] == (tensor,)
    transport.endpoints[1].sender("F", 2)(7, (tensor,), None)
    assert transport.outside.receive(("F", 2, 7))[0] == (tensor,)
    transport.endpoints[0].sender("B", -1)(7, (None,), None)
    assert transport.outside.receive(("B", -1, 7))[0] == (None,)


@given(st.permutations(range(6)), st.permutations(range(6)))
def test_any_order_of_sending_and_receiving(sent: list[int], wanted: list[int]) -> None:
    transport = LocalTransport((0, 1), {})
    send = transport.endpoints[0].sender("F", 1)
    for micro_batch in sent:
        send(micro_batch, (micro_batch,), None)
    assert [transport.endpoints[1].receive(("F", 1, number))[0][0] for number in wanted] == wanted


def test_several_stages_of_one_worker_pass_values_through_its_own_inbox() -> None:
    transport = LocalTransport((0, 1, 0), {})
    transport.endpoints[1].sender("F", 2)(0, ("from 1",), None)
    transport.outside.sender("B", 2)(0, ("gradient",), None)
    assert transport.endpoints[0].receive(("B", 2, 0))[0] == ("gradient",)
    assert transport.endpoints[0].receive(("F", 2, 0))[0] == ("from 1",)


def test_receiving_waits_for_the_message() -> None:
    transport = LocalTransport((0, 1), {})
    received: list[object] = []
    waiting = threading.Thread(target=lambda: received.append(transport.endpoints[1].receive(("F", 1, 0))[0]))
    waiting.start()
    transport.endpoints[0].sender("F", 1)(0, ("value",), None)
    waiting.join(timeout=10)
    assert received == [("value",)]


def test_stop_ends_whoever_waits() -> None:
    transport = LocalTransport((0, 1), {})
    transport.stop()
    with pytest.raises(Stopped):
        transport.endpoints[1].receive(("F", 1, 0))
