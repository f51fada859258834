"""Tied parameters of two ranks, which are threads here."""

from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import HashStore

from pipework.distributed.gradients.tied import Tied, TiedParameters, tied_parameters
from pipework.distributed.rendezvous import RendezvousSpec
from pipework.distributed.transport.channel import Channel
from pipework.distributed.transport.groups import group_of

STAGES, PLACEMENT = (0, 1, 2), (0, 1, 0)


class Rank:
    """A rank with its own copy of one parameter, which all three stages use."""

    def __init__(self, store: HashStore, rank: int) -> None:
        up, down = (group_of(store, name, (0, 1), rank) for name in ("up", "down"))
        ways = (up, down) if rank == 0 else (down, up)
        channels = {1 - rank: Channel(1 - rank, *ways, torch.device("cpu"))}
        self.parameter = nn.Parameter(torch.full((2,), float(rank)))
        spec = RendezvousSpec(PLACEMENT, [], [Tied(self.parameter, STAGES, "0.weight")])
        mesh: Any = SimpleNamespace(worker=rank, ranks=[4, 7])
        self.tied = TiedParameters(spec, mesh, channels)
        self.runs: Any = {
            stage: SimpleNamespace(aliases=SimpleNamespace(parameters=[self.parameter], leaves=[torch.zeros(2)]))
            for stage in STAGES
            if PLACEMENT[stage] == rank
        }

    def leaf(self, stage: int) -> Tensor:
        leaf: Tensor = self.runs[stage].aliases.leaves[0]
        return leaf


@pytest.fixture
def ranks() -> list[Rank]:
    store = HashStore()
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(lambda rank: Rank(store, rank), range(2)))


def on_both(ranks: list[Rank], name: str, *arguments: str) -> list[BaseException | None]:
    with ThreadPoolExecutor(2) as pool:
        jobs = [pool.submit(getattr(each.tied, name), *(getattr(each, a) for a in arguments)) for each in ranks]
        return [job.exception(20) for job in jobs]


def test_which_parameters_are_tied() -> None:
    first, second = nn.Linear(2, 2), nn.Linear(2, 2)
    tied = tied_parameters([first, nn.Sequential(first, second), second], [0, 1, 1])
    assert [each.stages for each in tied] == [(0, 1), (0, 1)]  # the second layer has stages of one worker only
    assert tied[0].parameter is first.weight


def test_gradients_are_added_from_the_last_stage_to_the_first(ranks: list[Rank]) -> None:
    assert on_both(ranks, "share_values") == [None, None]
    assert [each.tied.counted_elsewhere for each in ranks] == [set(), {id(ranks[1].parameter)}]
    gradients = [torch.tensor([1e8, 1.0]), torch.tensor([-1e8, 2.0]), torch.tensor([1.0, 4.0])]
    for stage, gradient in enumerate(gradients):
        ranks[PLACEMENT[stage]].leaf(stage).grad = gradient.clone()
    assert on_both(ranks, "add_up", "runs") == [None, None]
    total = gradients[2] + gradients[1] + gradients[0]
    assert not torch.equal(total, gradients[0] + gradients[1] + gradients[2])  # the order matters
    for rank, stage in ((0, 2), (1, 1)):
        grad = ranks[rank].leaf(stage).grad
        assert grad is not None
        assert torch.equal(grad, total)
    assert ranks[0].leaf(0).grad is None  # counted once on each rank


def test_without_any_gradient_there_is_none(ranks: list[Rank]) -> None:
    on_both(ranks, "share_values")
    ranks[1].leaf(1).grad = None
    assert on_both(ranks, "add_up", "runs") == [None, None]
    assert [ranks[PLACEMENT[stage]].leaf(stage).grad for stage in STAGES] == [None] * 3


@pytest.mark.parametrize("factor", [1 + 2**-20, 1.001])
def test_copies_that_have_drifted_apart(ranks: list[Rank], factor: float) -> None:
    """Another rounding of two processors is no error; other settings of two optimizers are."""
    with torch.no_grad():
        for each in ranks:
            each.parameter.copy_(torch.tensor([3.0, float("nan")]))
        ranks[1].parameter.mul_(factor)
    for error in on_both(ranks, "add_up", "runs"):
        if factor < 1.0001:
            assert error is None
        else:
            assert isinstance(error, ValueError)
            assert "the copies of the tied parameter '0.weight' (stages 0, 1, 2) have different values on rank" in str(
                error
            )
            assert {"4", "7"} <= {*str(error).replace(",", "").split()}


def test_copies_are_compared_in_the_first_steps_and_now_and_then_later(ranks: list[Rank]) -> None:
    on_both(ranks, "share_values")
    noticed = []
    for step in range(1, 65):
        with torch.no_grad():
            ranks[1].parameter.fill_(float(step not in (1, 4)))  # in these, the copies are the same
        if any(on_both(ranks, "add_up", "runs")):
            noticed.append(step)
    assert noticed == [2, 3, 32, 64]
