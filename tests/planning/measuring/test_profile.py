import gc
import random
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import pipework
from pipework import Pipe
from pipework.planning import Profile, profile
from pipework.planning.stages import StageSums
from tests.helpers import Pop, Stash

QUICK: dict[str, Any] = {"timeout": 0, "devices": ["cpu", "cpu"]}


def layers() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Linear(8, 32), nn.Tanh(), nn.LayerNorm(32), nn.Dropout(0.5), nn.BatchNorm1d(32), nn.Linear(32, 4)
    )


X, Y = torch.randn(16, 8), torch.zeros(16, 4)


def measured(module: nn.Sequential | None = None, **options: Any) -> Profile:
    return profile(module or layers(), X, **{"target": Y, "loss_fn": F.mse_loss, "rows": [2, 8], **QUICK, **options})


def test_each_layer_has_times_and_bytes() -> None:
    found = measured()
    assert (found.batch, found.rows, found.loss_inside) == (16, (2, 8), True)
    assert [layer.type for layer in found.layers] == [type(layer).__name__ for layer in layers()]
    assert found.layers[0].weights == found.layers[0].trained == 4 * (8 * 32 + 32)
    assert found.layers[4].buffers == 4 * 64 + 8
    assert found.devices == {"cpu": "cpu"}
    seconds = found.at(4).seconds["cpu"]
    assert all(each.forward > 0 for each in seconds)
    assert [seconds[index].weight_gradient > 0 for index in (0, 1, 3, 5)] == [True, False, False, True]
    sizes = found.at(2).bytes
    assert sizes[0].input == 4 * 2 * 8
    assert sizes[0].output == 4 * 2 * 32
    assert sizes[5].output == 4  # the loss


class Drawing(nn.Module):
    """Draws from Python's generator."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * random.random()


def test_nothing_of_the_module_and_no_random_state_changes() -> None:
    module = layers().append(Drawing())
    of_python = random.getstate()
    before = {name: each.clone() for name, each in module.state_dict().items()}
    state = torch.get_rng_state()
    with torch.inference_mode():
        assert measured(module).at(4).seconds["cpu"][0].weight_gradient > 0
        assert torch.is_inference_mode_enabled()
    pipework.plan(module, X, target=Y, loss_fn=F.mse_loss, devices=["cpu", "cpu"], iterations=5, timeout=0)
    assert random.getstate() == of_python
    assert all(torch.equal(before[name], each) for name, each in module.state_dict().items())
    assert torch.equal(state, torch.get_rng_state())
    assert all(each.grad is None for each in module.parameters())


@pytest.mark.parametrize("balance", [[1, 5], [3, 3]])
def test_the_bytes_of_a_stage_follow_from_those_of_its_layers(balance: list[int]) -> None:
    """Compared with what a pipe counts for the same stages."""
    module = layers()
    costs = StageSums(measured(module), 2, optimizer=0.0).costs(balance, ["cpu"] * 2)
    pipe = Pipe(module, 8, "never", balance=balance, devices=["cpu", "cpu"], schedule="1f1b", loss_fn=F.mse_loss)
    predicted = pipe.predict(X, target=Y, timeout=0).costs
    spread = [each.spread(2) for each in (costs, predicted)]
    for sums, whole in zip(spread[0]["activation"], spread[1]["activation"], strict=True):
        assert whole * 0.95 - 64 <= sums <= whole * 1.05


def test_a_layer_that_stands_there_twice() -> None:
    layer = nn.Linear(8, 8)
    module = nn.Sequential(layer, nn.ReLU(), layer, nn.Linear(8, 4))
    assert [each.name for each in measured(module).layers] == ["0", "1", "2", "3"]
    found = pipework.plan(module, X, target=Y, loss_fn=F.mse_loss, devices=["cpu", "cpu"], iterations=5, timeout=0)
    Pipe(module, plan=found, loss_fn=F.mse_loss)(X, target=Y).backward()
    assert layer.weight.grad is not None


def test_skip_connections_are_named() -> None:
    module = nn.Sequential(Stash(), nn.Linear(8, 8), nn.ReLU(), Pop(), nn.Linear(8, 4))
    (skip,) = measured(module).skips
    assert (skip.source, skip.target, skip.size) == (0, 3, (4 * 2 * 8, 4 * 8 * 8))
    options: dict[str, Any] = {"devices": ["cpu"] * 5, "schedules": ["1f1b"], "iterations": 5, "timeout": 0}
    found = pipework.plan(module, X, target=Y, loss_fn=F.mse_loss, chunks=4, **options)
    Pipe(module, plan=found, loss_fn=F.mse_loss)(X, target=Y).backward()


def test_sizes_are_chosen_from_one_micro_batch_for_each_worker_to_many() -> None:
    found = profile(layers(), X, **QUICK)
    assert found.rows[-1] == 8
    assert 1 < found.rows[0] < 8  # a batch norm refuses one row
    assert len(found.rows) <= 4
    assert not found.loss_inside


class InACycle(nn.Module):
    """Leaves its output in a cycle of objects, which Python frees some time later: here, in the next forward."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gc.collect()
        held: list[Any] = [3 * x]
        held.append(held)
        return torch.tanh(held[0])


def test_what_python_frees_later_does_not_make_bytes_negative() -> None:
    (sizes,) = measured(nn.Sequential(InACycle(), nn.Linear(8, 4)), rows=[2]).bytes
    assert sizes[0].kept > 0
    assert sizes[0].waiting >= 0
