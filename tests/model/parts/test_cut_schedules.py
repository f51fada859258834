"""Parts in every schedule, with several workers and stages; micro-batches that are given; inputs that are not split."""

import copy

import pytest
import torch

from pipework import MicroBatches
from pipework.schedule import SCHEDULES, build
from tests.model.parts.harness import assert_exact, assert_same, attached, loss_in
from tests.model.parts.models import Deep, Frozen, batch_of

NAMES = sorted(set(SCHEDULES) - {"forward-only"})  # which a pipe refuses: it has no backwards


def cut_for(name: str, units: int) -> list[int]:
    stages = len(build(name, workers=2, chunks=8).placement)
    return [units * (n + 1) // stages - units * n // stages for n in range(stages)]


SAMPLE = ("1f1b", "interleaved-1f1b", "zb-h1", "zb-v", "looped-bfs")


@pytest.mark.parametrize(
    "name", [name if name in SAMPLE else pytest.param(name, marks=pytest.mark.thorough) for name in NAMES]
)
def test_two_workers(name: str) -> None:
    kind = [Deep, Frozen][name in ("1f1b", "zb-h1", "zb-h2", "gpipe")]
    units = 5 if kind is Frozen else 16
    assert_exact(
        kind(), batch_of(kind), chunks=4, schedule=name, balance=cut_for(name, units), steps=1,
        but=kind().state_dict() if kind is Frozen else (),
    )  # fmt: skip


@pytest.mark.parametrize("schedule", ["1f1b", "zb-v"])
def test_given_micro_batches_of_other_sizes(schedule: str) -> None:
    model, batch = Deep(), batch_of(Deep)
    plain = copy.deepcopy(model)
    attached(model, batch, chunks=3, schedule=schedule, balance=cut_for(schedule, 16))
    pieces = [{key: value[a:b].clone() for key, value in batch.items()} for a, b in ((0, 1), (1, 5), (5, 8))]
    loss = loss_in(model(**{key: MicroBatches([piece[key] for piece in pieces]) for key in batch}))
    loss.backward()
    losses = [loss_in(plain(**piece)) * (len(piece["x"]) / 8) for piece in pieces]
    for each in losses:
        each.backward()
    assert torch.equal(loss.detach(), losses[0].detach() + losses[1].detach() + losses[2].detach())
    assert_same(model, plain)
