"""Parts in every schedule, with several workers and stages; micro-batches that are given; inputs that are not split."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipework import MicroBatches, NoChunk
from pipework.schedule import SCHEDULES, build, schedule_spec
from tests.model.parts.harness import assert_exact, assert_same, attached, loss_in, plain_step
from tests.model.parts.models import WIDTH, Block, Frozen, batch_of, loss_of


class Deep(nn.Module):
    """Units of several sizes, one without parameters, and a mask that all blocks read."""

    def __init__(self, blocks: int = 13) -> None:
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.squash = nn.Tanh()
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, mask: Tensor | None = None, labels: Tensor | None = None) -> Any:
        keep = None if mask is None else mask.to(x.dtype)
        x = self.embed(x)
        for block in self.blocks:
            x = block(x, keep)
        return loss_of(self.head(self.norm(self.squash(x))), labels)


NAMES = sorted(set(SCHEDULES) - {"forward-only"})  # which a pipe refuses: it has no backwards
LARGE = [
    (name, 4, stages)
    for name in NAMES
    for stages in ((2, 4 if name == "hanayo" else 3) if schedule_spec(name).any_stages_per_worker else (None,))
]


def stages_of(name: str, workers: int, per_worker: int | None) -> int:
    return len(build(name, workers=workers, chunks=8, stages_per_worker=per_worker).placement)


def cut_for(name: str, workers: int, per_worker: int | None, units: int) -> list[int]:
    stages = stages_of(name, workers, per_worker)
    return [units * (n + 1) // stages - units * n // stages for n in range(stages)]


SAMPLE = ("1f1b", "interleaved-1f1b", "zb-h1", "zb-v", "looped-bfs")


@pytest.mark.parametrize(
    "name", [name if name in SAMPLE else pytest.param(name, marks=pytest.mark.thorough) for name in NAMES]
)
def test_two_workers(name: str) -> None:
    kind = [Deep, Frozen][name in ("1f1b", "zb-h1", "zb-h2", "gpipe")]
    units = 5 if kind is Frozen else 16
    assert_exact(
        kind(), batch_of(kind), chunks=4, schedule=name, balance=cut_for(name, 2, None, units), steps=1,
        but=kind().state_dict() if kind is Frozen else (),
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("checkpoint", ["always", "except_last", "never"])
@pytest.mark.parametrize(("name", "workers", "per_worker"), LARGE, ids=str)
def test_four_workers(name: str, workers: int, per_worker: int | None, checkpoint: str) -> None:
    schedule = build(name, workers=workers, chunks=8, stages_per_worker=per_worker)
    batch = {**batch_of(Deep, 16), "mask": NoChunk(torch.ones(1, WIDTH))}
    assert_exact(
        Deep(), batch, chunks=8, schedule=schedule, balance=cut_for(name, workers, per_worker, 16), steps=2,
        devices=["cpu"] * workers, checkpoint=checkpoint,
    )  # fmt: skip


@pytest.mark.parametrize("schedule", ["1f1b", "zb-v"])
def test_given_micro_batches_of_other_sizes(schedule: str) -> None:
    model, batch = Deep(), batch_of(Deep)
    plain = copy.deepcopy(model)
    attached(model, batch, chunks=3, schedule=schedule, balance=cut_for(schedule, 2, None, 16))
    pieces = [{key: value[a:b].clone() for key, value in batch.items()} for a, b in ((0, 1), (1, 5), (5, 8))]
    loss = loss_in(model(**{key: MicroBatches([piece[key] for piece in pieces]) for key in batch}))
    loss.backward()
    losses = [loss_in(plain(**piece)) * (len(piece["x"]) / 8) for piece in pieces]
    for each in losses:
        each.backward()
    assert torch.equal(loss.detach(), losses[0].detach() + losses[1].detach() + losses[2].detach())
    assert_same(model, plain)


def test_on_the_meta_device() -> None:
    losses = []
    for balance in ([8, 8], [3, 5, 4, 4]):
        torch.manual_seed(4)
        with torch.device("meta"):
            model = Deep()
        attached(model, batch_of(Deep), chunks=4, balance=balance, devices=["cpu"] * len(balance))
        loss = loss_in(model(**batch_of(Deep)))
        loss.backward()
        losses.append(loss.detach())
        plain = Deep()
        plain.load_state_dict(model.state_dict())
        assert torch.equal(plain_step(plain, batch_of(Deep), 4), loss)
        assert_same(model, plain)
    assert torch.equal(*losses)
