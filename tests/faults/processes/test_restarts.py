"""`torchrun --max-restarts` starts the ranks again after a fault, and the training ends as if there had been none."""

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.faults.processes.launching import Launch
from tests.faults.processes.script import train
from tests.faults.processes.training import PATIENCE

JOINED = 10.0  # seconds from a rank's last step until all are there again
STEPS = 9


def final_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """The parameters and the optimizer's state at the end."""
    place = folder / "checkpoints" / f"step-{STEPS:08d}"
    assert (place / "COMPLETE").is_file()
    return {
        f"{path.name} {name}": each
        for path in sorted(place.glob("*-stage-*.safetensors"))
        for name, each in load_file(path).items()
    }


@pytest.fixture
def undisturbed(on_ranks: Callable[..., object], tmp_path: Path) -> dict[str, torch.Tensor]:
    folder = tmp_path / "undisturbed"
    folder.mkdir()
    on_ranks(2, train, folder=str(folder), steps=STEPS)
    return final_tensors(folder)


def check_restart(launch: Callable[..., Launch], undisturbed: dict[str, torch.Tensor], faults: list[str]) -> None:
    launched = launch("--steps", str(STEPS), restarts=len(faults), fault=";".join(faults))
    assert launched.wait() == 0, launched.log
    assert not launched.left_over()
    for attempt in range(len(faults)):
        last = max(float(path.read_text().split()[1]) for path in launched.folder.glob(f"step.{attempt}.*"))
        joined = max(float((launched.folder / f"joined.{attempt + 1}.{rank}").read_text()) for rank in range(2))
        assert joined - last <= JOINED * PATIENCE
    found = final_tensors(launched.folder)
    assert found.keys() == undisturbed.keys()
    assert all(torch.equal(found[name], undisturbed[name]) for name in found)


@pytest.mark.thorough
@pytest.mark.timeout(240)
def test_two_restarts(launch: Callable[..., Launch], undisturbed: dict[str, torch.Tensor]) -> None:
    faults = [
        "rank=0,step=5,action=F,micro_batch=0,kind=raise,attempt=0",
        "rank=1,step=2,action=save,kind=kill,attempt=1",
    ]
    check_restart(launch, undisturbed, faults)


@pytest.mark.slow
@pytest.mark.parametrize("number", range(20))
def test_any_restart(launch: Callable[..., Launch], undisturbed: dict[str, torch.Tensor], number: int) -> None:
    choice = random.Random(number)
    kind = choice.choice(["kill", "raise", "exit"])
    action = choice.choice(["F", "B", "optimizer", "save"])
    rank = choice.randrange(2)
    # A save comes after every third step, which is the one with the number 2, 5 or 8.
    step = choice.choice([2, 5]) if action == "save" else choice.randrange(1, 8)
    place = f"rank={rank},step={step},action={action}"
    if action in "FB":
        place += f",micro_batch={choice.randrange(4)}"
    check_restart(launch, undisturbed, [f"{place},kind={kind},attempt=0"])
