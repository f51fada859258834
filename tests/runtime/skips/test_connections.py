from typing import Any

import pytest
import torch
from torch import Tensor

from pipework.runtime.skips.connections import Bundle, SkipPorts
from pipework.runtime.skips.skip import Skip
from pipework.runtime.skips.stashed import Stashed
from pipework.runtime.transport import LocalTransport

PLACES = (0, 1, 2)
SKIPS = [Skip("a", 0, (1, 2), PLACES), Skip("b", 0, (2,), PLACES), Skip("inside", 1, (1,), PLACES)]


def connected(skips: list[Skip]) -> tuple[list[SkipPorts], list[tuple[str, int]]]:
    """The ports of stages with a worker each, and a list that gets the name and the receiver of what they send."""
    stages = len(skips[0].places)
    transport = LocalTransport(tuple(range(stages)), {})
    sent: list[tuple[str, int]] = []

    class Counting:
        def __init__(self, endpoint: Any) -> None:
            self.receiver = endpoint.receiver
            self._endpoint = endpoint

        def sender(self, kind: str, stage: int) -> Any:
            send = self._endpoint.sender(kind, stage)

            def counted(*message: Any) -> None:
                sent.append((kind, stage))
                send(*message)

            return counted

    ports = [SkipPorts(stage, skips) for stage in range(stages)]
    for stage, each in enumerate(ports):
        each.connect(Counting(transport.endpoints[stage]))
    return ports, sent


@pytest.fixture
def ports() -> list[SkipPorts]:
    return connected(SKIPS)[0]


def send(ports: SkipPorts, *tensors: Tensor | None, same: tuple[tuple[int, int], ...] = ()) -> None:
    """Sends what a stage stashes, beside a value without tensors."""
    present = tuple(tensor is not None for tensor in tensors)
    ports.send(0, tuple(tensor for tensor in tensors if tensor is not None), Bundle(None, 0, present, same), [])


def test_tensors_go_straight_to_every_stage_that_pops_and_gradients_back_to_the_one_below(
    ports: list[SkipPorts],
) -> None:
    a, b, value = torch.ones(2, requires_grad=True) * 1, torch.ones(3), torch.zeros(1)
    ports[0].receive(0, (), None)
    send(ports[0], a, b)
    leaves, bundle, _ = ports[1].receive(0, (value,), None)
    send(ports[1])
    assert (bundle.own, bundle.present) == (1, (True,))
    assert leaves[1].is_leaf
    assert leaves[1].requires_grad
    assert leaves[1].data_ptr() == a.data_ptr()
    others, bundle, _ = ports[2].receive(0, (value, value), None)
    send(ports[2])
    assert (bundle.own, bundle.present) == (2, (True, True))
    assert others[2] is not leaves[1]
    assert not others[3].requires_grad
    own, of_a, of_b, sum_of_a = torch.full((1,), 7.0), torch.ones(2), torch.ones(3), torch.zeros(2)
    assert ports[2].receive_gradients(0) == ()
    assert ports[2].send_gradients(0, (own, of_a, of_b)) == (own,)
    assert ports[1].receive_gradients(0) == (of_a,)
    assert ports[1].send_gradients(0, (own, sum_of_a)) == (own,)
    assert ports[0].receive_gradients(0) == (sum_of_a, of_b)


def test_stages_of_one_place_hand_a_tensor_on() -> None:
    ports, sent = connected([Skip("a", 0, (1, 2, 3, 5), (0, 1, 0, 1, 0, 1))])
    ports[0].receive(0, (), None)
    send(ports[0], torch.ones(2, requires_grad=True))
    for stage in (1, 2, 3, 5):
        leaves, _, _ = ports[stage].receive(0, (), None)
        assert leaves[0].is_leaf
        assert leaves[0].requires_grad
    assert sent == [("F skip 0", 1), ("F skip 0", 2), ("F skip 0", 3), ("F skip 0", 5)]
    sent.clear()
    for stage in (5, 3, 2, 1):
        ports[stage].send_gradients(0, (torch.ones(2),))
    assert sent == [("B skip 0", 3), ("B skip 0", 2), ("B skip 0", 1), ("B skip 0", 0)]


def test_the_gradient_of_a_tensor_that_is_returned_too_goes_to_the_stage_behind() -> None:
    ports, sent = connected([Skip("a", 0, (2, 3), (0, 1, 2, 3))])
    leaf, alias = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    ports[0].receive(0, (), None)
    send(ports[0], leaf, same=((0, 0),))
    assert ports[1].awaits("B skip 0", 0) is None  # it may still come to stage 0
    _, bundle, _ = ports[1].receive(0, (leaf,), Stashed(None, (), ((0, 0),)))
    assert ports[1].entered(0, [], [alias], bundle) == ({}, [alias])
    for stage in (1, 2, 3):
        if stage > 1:
            ports[stage].receive(0, (), None)
        send(ports[stage])
    assert [each.awaits("B skip 0", 0) for each in ports] == [False, True, True, False]
    assert ports[0].awaits("B", 0)
    sent.clear()
    for stage in (3, 2):
        ports[stage].send_gradients(0, (torch.ones(2),))
    assert sent == [("B skip 0", 2), ("B skip 0", 1)]
    assert ports[0].receive_gradients(0) == (None,)
    (total,) = ports[1].receive_gradients(0)
    assert torch.equal(total, torch.ones(2))
