from typing import Any

import pytest
import torch
from torch import Tensor

from pipework.runtime.skips.connections import Skip, SkipPorts
from pipework.runtime.transport import LocalTransport

PLACES = (0, 1, 2)
SKIPS = [Skip("a", 0, (1, 2), PLACES), Skip("b", 0, (2,), PLACES), Skip("inside", 1, (1,), PLACES)]


@pytest.fixture
def ports() -> list[SkipPorts]:
    transport = LocalTransport((0, 1, 2), {})
    made = [SkipPorts(stage, SKIPS) for stage in range(3)]
    for stage, each in enumerate(made):
        each.connect(transport.endpoints[stage])
    return made


def test_only_stages_that_stash_or_pop_are_touched() -> None:
    assert [SkipPorts(stage, SKIPS[:2]).touched for stage in range(4)] == [True, True, True, False]


def test_tensors_go_straight_to_every_stage_that_pops_as_leaves_of_their_own(ports: list[SkipPorts]) -> None:
    a, b, value = torch.ones(2, requires_grad=True) * 1, torch.ones(3), torch.zeros(1)
    ports[0].send(5, [a, b], (True, True))
    leaves, bundle = ports[1].receive(5, (value,), None)
    assert (bundle.own, bundle.present) == (1, (True,))
    assert leaves[1].is_leaf
    assert leaves[1].requires_grad
    assert leaves[1].data_ptr() == a.data_ptr()
    others, bundle = ports[2].receive(5, (value, value), None)
    assert (bundle.own, bundle.present) == (2, (True, True))
    assert others[2] is not leaves[1]
    assert not others[3].requires_grad


def test_gradients_go_back_and_are_added_the_last_stage_first(ports: list[SkipPorts]) -> None:
    tensors = [torch.ones(2, requires_grad=True), torch.ones(3, requires_grad=True)]
    ports[0].send(0, tensors, (True, True))
    for stage in (1, 2):
        ports[stage].receive(0, (torch.zeros(1),), None)
    own = torch.full((1,), 7.0)
    assert ports[2].send_gradients(0, (own, torch.full((2,), 1e8), torch.full((3,), 2.0))) == (own,)
    assert ports[1].send_gradients(0, (own, torch.full((2,), 1.0))) == (own,)
    of_a, of_b = ports[0].receive_gradients(0)
    assert torch.equal(of_a, torch.full((2,), 1e8) + 1.0)
    assert torch.equal(of_b, torch.full((3,), 2.0))


def test_none_may_be_stashed_and_has_no_gradient(ports: list[SkipPorts]) -> None:
    ports[0].send(0, [torch.ones(3)], (False, True))
    assert ports[0].stashed(["b"], (False, True)) == [(1, "b")]
    _, bundle = ports[1].receive(0, (), None)
    assert bundle.present == (False,)
    leaves, _ = ports[2].receive(0, (), None)
    assert len(leaves) == 1
    ports[1].send_gradients(0, ())
    ports[2].send_gradients(0, (None,))
    assert ports[0].receive_gradients(0) == (None,)


def test_the_tracker_of_a_stage_has_what_it_pops_and_collects_what_it_stashes(ports: list[SkipPorts]) -> None:
    alias: Tensor = torch.ones(1)
    popping = ports[2].tracker([alias], (True, False))
    assert popping.load("a") is alias
    assert popping.load("b") is None
    stashing = ports[0].tracker([], ())
    stashing.save("b", alias, 1)
    stashing.save("a", None, 2)
    assert stashing.outgoing() == (None, alias)


def connected(places: tuple[int, ...], destinations: tuple[int, ...]) -> tuple[list[SkipPorts], list[tuple[str, int]]]:
    """The ports of stages with a worker each, and a list that gets the name and the receiver of what they send."""
    transport = LocalTransport(tuple(range(len(places))), {})
    sent: list[tuple[str, int]] = []

    class Counting:
        def __init__(self, endpoint: Any) -> None:
            self.receive = endpoint.receive
            self._endpoint = endpoint

        def sender(self, kind: str, stage: int) -> Any:
            send = self._endpoint.sender(kind, stage)

            def counted(*message: Any) -> None:
                sent.append((kind, stage))
                send(*message)

            return counted

    ports = [SkipPorts(stage, [Skip("a", 0, destinations, places)]) for stage in range(len(places))]
    for stage, each in enumerate(ports):
        each.connect(Counting(transport.endpoints[stage]))
    return ports, sent


def test_stages_of_one_place_hand_a_tensor_on_and_sum_where_the_order_allows() -> None:
    ports, sent = connected((0, 1, 0, 1, 0, 1), (1, 2, 3, 5))
    ports[0].send(0, [torch.ones(2, requires_grad=True)], (True,))
    for stage in (1, 2, 3, 5):
        leaves, _ = ports[stage].receive(0, (), None)
        assert leaves[0].is_leaf
        assert leaves[0].requires_grad
    assert sent == [("F skip 0", 1), ("F skip 0", 2), ("F skip 0", 3), ("F skip 0", 5)]
    sent.clear()
    parts = {stage: torch.rand(2) * 10**stage for stage in (5, 3, 2, 1)}
    for stage, part in parts.items():
        ports[stage].send_gradients(0, (part,))
    (total,) = ports[0].receive_gradients(0)
    assert torch.equal(total, ((parts[5] + parts[3]) + parts[2]) + parts[1])
    assert sent == [("B skip 0 from 5", 3), ("B skip 0 from 3", 0), ("B skip 0 from 2", 0), ("B skip 0 from 1", 0)]


@pytest.mark.parametrize("present", [(True, False), (False, True), (False, False)])
def test_a_stage_without_a_gradient_hands_on_that_of_a_later_one(present: tuple[bool, bool]) -> None:
    ports, _ = connected((0, 1, 1), (1, 2))
    ports[0].send(0, [torch.ones(2, requires_grad=True)], (True,))
    for stage in (1, 2):
        ports[stage].receive(0, (), None)
    parts = [torch.ones(2) if each else None for each in present]
    for stage in (2, 1):
        ports[stage].send_gradients(0, (parts[stage - 1],))
    (total,) = ports[0].receive_gradients(0)
    assert total is (None if present == (False, False) else parts[present.index(True)])


def test_a_device_gets_one_copy() -> None:
    skip = Skip("a", 0, (1, 2, 3), places=("cpu", "cuda:0", "cuda:1", "cuda:0"))
    assert sorted(skip.hops) == [(0, 1), (0, 2), (0, 3), (1, 3)]
    assert [skip.value_from(stage) for stage in (1, 2, 3)] == [0, 0, 1]
    one = Skip("a", 0, (1, 2), places=("cpu", "cuda:0", "cuda:0"))
    assert sorted(one.hops) == [(0, 1), (1, 2)]
