"""What ranks hold if replicas share, worked out by hand; `benchmarks/sharding` compares it with what processes hold."""

import pytest
import torch
from torch import nn

from pipework import Pipe
from pipework.planning.measuring.predict import Prediction
from pipework.planning.measuring.sharing import RankBytes

WIDTH = 64
WEIGHTS = 4 * WIDTH * WIDTH  # of a stage, in bytes; the rest is small beside it
BATCH = 2


def prediction(schedule: str, stages: int, optimizer: float | None = 2) -> Prediction:
    layers = nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2 * stages)])
    pipe = Pipe(
        layers, BATCH, "never", balance=[1] * 2 * stages, schedule=schedule, devices=["cpu"] * 2,
        loss_fn=nn.functional.mse_loss,
    )  # fmt: skip
    rows = torch.ones(BATCH, WIDTH)
    return pipe.predict(rows, target=rows, optimizer=optimizer, timeout=0)


def by_choice(prediction: Prediction, replicas: int) -> dict[str, RankBytes]:
    return {each.choice: each for each in prediction.sharing(replicas).ranks}


def parts(found: RankBytes) -> tuple[float, float, float]:
    """Weights, gradients and the optimizer's state, in stages."""
    return found.weights / WEIGHTS, found.gradients / WEIGHTS, found.optimizer / WEIGHTS


def test_one_stage_for_each_worker() -> None:
    found = by_choice(prediction("1f1b", 1), replicas=4)
    assert list(found) == ["replicas", "ZeRO-1", "fully_shard"]
    assert parts(found["replicas"]) == (1, 1, 2)
    assert parts(found["ZeRO-1"]) == (1, 1, 0.5)
    assert parts(found["fully_shard"]) == (1 + 0.25, 1, 0.5)  # whole beside the part
    assert [found[name].between_steps / WEIGHTS for name in found] == [3, 1.5, 0.75]
    assert all(each.total - sum(parts(each)) * WEIGHTS == each.activations for each in found.values())
    assert 1 < found["replicas"].activations / WEIGHTS < 1.1  # the gradient of the second micro-batch, to be added


def test_several_stages_of_which_some_are_whole() -> None:
    found = by_choice(prediction("looped-bfs", 4), replicas=2)
    assert list(found)[2:] == ["fully_shard", "fully_shard, whole_stages=2", "fully_shard, whole_stages=1"]
    # The gradient of the last stage, of which a part stays, is being sent while that of the one before it is made.
    assert parts(found["fully_shard"]) == (4 / 2 + 3, 0.5 + 2 + 1, 4)
    # Three stages have been reduced, the gradient of the third is being sent, and the last one is whole.
    assert parts(found["fully_shard, whole_stages=1"]) == (4 / 2 + 1, 3 * 0.5 + 2 + 1, 4)
    totals = [each.total for each in found.values()][2:]
    assert totals == sorted(totals, reverse=True)


def test_a_single_replica_shares_nothing() -> None:
    found = by_choice(prediction("looped-bfs", 2, optimizer=None), replicas=1)
    assert len({(each.weights, each.gradients, each.total) for each in found.values()}) == 1
    assert {each.optimizer for each in found.values()} == {0}


def test_the_table() -> None:
    lines = str(prediction("1f1b", 1).sharing(2)).splitlines()
    assert lines[0] == "the largest of 2 workers x 2 replicas: 1f1b, 2 workers, 2 micro-batches"
    assert " ".join(lines[1].split()) == "at the peak weights gradients optimizer activations total between steps"
    assert " ".join(lines[3].split()[:7]) == "ZeRO-1 16.0 KiB 16.0 KiB 16.0 KiB"


@pytest.mark.parametrize("replicas", [0, True, 1.5, None])
def test_what_is_no_number_of_replicas(replicas: object) -> None:
    with pytest.raises(ValueError, match="replicas is the number of replicas of the pipe"):
        prediction("1f1b", 1).sharing(replicas)  # type: ignore[arg-type]
