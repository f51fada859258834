from typing import Any

import torch
from torch import Tensor

from pipework.runtime.skips import skip_tracker
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


def receive(ports: SkipPorts, *value: Tensor, stashed: Stashed | None = None) -> tuple[Any, Any]:
    return ports.receive(lambda micro_batch: (value, stashed), 0)


def send(ports: SkipPorts, *tensors: Tensor | None, **more: Any) -> None:
    """Sends what a stage stashes, beside a value without tensors."""
    present = tuple(tensor is not None for tensor in tensors)
    outputs = tuple(tensor for tensor in tensors if tensor is not None)
    ports.send(lambda micro_batch, message: None, 0, (outputs, Bundle(None, 0, present, **more)))


def gradients(ports: SkipPorts) -> tuple[Tensor | None, ...]:
    """The gradients of skips that a stage receives, beside those of a value without tensors."""
    return ports.receive_gradients(lambda micro_batch: ((), None), 0)[0]


def send_gradients(ports: SkipPorts, *of_leaves: Tensor) -> tuple[Tensor | None, ...]:
    """Sends the gradients of a stage's leaves; returns those of the value."""
    sent: list[Any] = []
    ports.send_gradients(lambda micro_batch, message: sent.extend(message[0]), 0, (of_leaves, None))
    return tuple(sent)


def test_tensors_go_straight_to_every_stage_that_pops_and_gradients_back_to_the_one_below() -> None:
    ports, _ = connected(SKIPS)
    a, b, value = torch.ones(2, requires_grad=True) * 1, torch.ones(3), torch.zeros(1)
    receive(ports[0])
    send(ports[0], a, b, awaited=(0, 1))
    leaves, received = receive(ports[1], value)
    send(ports[1], awaited=(0,))
    assert (received.own, received.popped) == (1, (0,))
    assert leaves[1].is_leaf
    assert leaves[1].requires_grad
    assert leaves[1].data_ptr() == a.data_ptr()
    others, received = receive(ports[2], value, value)
    send(ports[2])
    assert (received.own, received.popped) == (2, (0, 1))
    assert others[2] is not leaves[1]
    assert not others[3].requires_grad
    own, of_a, of_b, sum_of_a = torch.full((1,), 7.0), torch.ones(2), torch.ones(3), torch.zeros(2)
    assert gradients(ports[2]) == ()
    assert send_gradients(ports[2], own, own, of_a, of_b) == (own, own)
    assert gradients(ports[1]) == (of_a,)
    assert send_gradients(ports[1], own, sum_of_a) == (own,)
    assert gradients(ports[0]) == (sum_of_a, of_b)


def test_stages_of_one_place_hand_a_tensor_on() -> None:
    ports, sent = connected([Skip("a", 0, (1, 2, 3, 5), (0, 1, 0, 1, 0, 1))])
    receive(ports[0])
    send(ports[0], torch.ones(2, requires_grad=True))
    for stage in (1, 2, 3, 5):
        leaves, _ = receive(ports[stage])
        assert leaves[0].is_leaf
        assert leaves[0].requires_grad
    assert sent == [("F skip 0", 1), ("F skip 0", 2), ("F skip 0", 3), ("F skip 0", 5)]
    sent.clear()
    for stage in (5, 3, 2, 1):
        send_gradients(ports[stage], torch.ones(2))
    assert sent == [("B skip 0", 3), ("B skip 0", 2), ("B skip 0", 1), ("B skip 0", 0)]


def test_the_gradient_of_a_tensor_that_is_returned_too_goes_to_the_stage_behind() -> None:
    ports, sent = connected([Skip("a", 0, (2, 3), (0, 1, 2, 3))])
    leaf, begun = torch.ones(2, requires_grad=True), []

    def stash(value: tuple[Tensor, ...], structure: Any, micro_batch: int) -> tuple[Any, Any]:
        skip_tracker.current().save("a", leaf, 2)
        return (leaf,), None

    def keep(value: tuple[Tensor, ...], structure: Any, micro_batch: int) -> tuple[Any, Any]:
        return value, structure

    messages: list[Any] = [((), None)]
    for each, layers in zip(ports, (stash, keep, keep, keep), strict=True):
        leaves, received = receive(each, *messages[-1][0], stashed=messages[-1][1])
        outputs, bundle = each.run(layers, leaves, received, 0)
        begun.append(bundle.begun)
        assert each.awaits("B skip 0", 0) is None, "known after the forward"
        each.send(lambda micro_batch, message: messages.append(message), 0, (outputs, bundle))
    assert messages[1][1].same == ((0, 0),)
    assert [len(each) for each in begun] == [0, 1, 1, 0], "where gradients from later stages begin"
    assert [each.awaits("B skip 0", 0) for each in ports] == [False, True, True, False]
    assert ports[0].awaits("B", 0)
    sent.clear()
    for stage in (3, 2):
        send_gradients(ports[stage], torch.zeros(2), torch.ones(2))
    assert sent == [("B skip 0", 2), ("B skip 0", 1)]
    assert gradients(ports[0]) == (None,)
    (total,) = gradients(ports[1])
    assert torch.equal(total, torch.ones(2))
