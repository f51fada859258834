"""What `migration_speed` compares, and when it says that an adapter is faster."""

from collections.abc import Iterator

import pytest
import torch
from torch import nn

import pipework.compat.torchgpipe
from benchmarks.migration_speed.run import MODES, Line, check, verdicts_of
from benchmarks.migration_speed.scripts import LIBRARIES, Script, Task, rewritten, running, unpipelined


def model(_: object) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))


@pytest.fixture
def task() -> Task:
    return Task(model, (torch.randn(6, 4), torch.randn(6, 2)), balance=[1, 2], chunks=3)


@pytest.fixture
def scripts(task: Task) -> Iterator[dict[Line, Script]]:
    torchgpipe = LIBRARIES[0].through_the_adapter()
    with running() as start:
        yield {
            Line(): unpipelined(task),
            **{Line(mode, "torchgpipe"): start(torchgpipe, task, mode) for mode in MODES},
            **{Line(mode): start(rewritten, task, mode) for mode in MODES},
        }


def test_scripts_compute_the_same_gradients(scripts: dict[Line, Script]) -> None:
    check(scripts)
    assert isinstance(scripts[Line("never", "torchgpipe")].model, pipework.compat.torchgpipe.GPipe)


def test_an_adapter_is_held_against_its_original_and_else_against_one_core() -> None:
    seconds = {
        Line(): [4.0],
        Line("never", "a", original=True): [2.0],
        Line("never", "a"): [1.0],
        Line("never", "b"): [5.0],
        Line("never"): [1.0],
    }
    faster, slower = verdicts_of("model", seconds)
    assert (faster.measured, faster.reached) == (0.5, True)
    assert faster.what == "faster than the original: model, a, adapter, 'never'"
    assert (slower.measured, slower.reached) == (1.25, False)
    assert slower.what == "faster than un-pipelined, one core: model, b, adapter, 'never'"
