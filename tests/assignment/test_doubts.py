import copy
from typing import Any

import pytest
import torch
from torch import nn

from pipework import Pipe, PipeWarning, WithDevice
from pipework.assignment import devices as assignment_devices
from pipework.schedule import fill_drain

TWO = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
ONE = nn.Sequential(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))


@pytest.mark.parametrize("options", [{}, {"devices": ["cpu", "cpu"]}, {"balance": [1, 1]}])
def test_several_workers_and_one_micro_batch(options: dict[str, Any]) -> None:
    with pytest.warns(PipeWarning, match="^chunks is 1, so 2 workers wait for each other.*give Pipe chunks=8") as seen:
        Pipe(copy.deepcopy(TWO), **options)
    assert len(seen) == 1
    assert seen[0].filename == __file__


def test_a_model_in_one_layer() -> None:
    with pytest.warns(PipeWarning, match=r"one worker has all .* has, 1 layer, and nothing.*\*model.blocks"):
        Pipe(copy.deepcopy(ONE), 4)
    with pytest.warns(PipeWarning, match="one worker has all that the nn.Sequential has"):
        Pipe(copy.deepcopy(ONE), 4, devices=["cpu", "cpu"])
    with pytest.warns(PipeWarning, match="^one worker has all .* has, 2 layers"):
        Pipe(copy.deepcopy(TWO), 4, schedule="interleaved-1f1b", loss_fn=torch.nn.functional.mse_loss)


def test_one_accelerator_found(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = assignment_devices.Machine((torch.device("cpu"),), cores=8)  # stands for an accelerator
    monkeypatch.setattr(assignment_devices.Machine, "here", lambda: machine)
    with pytest.warns(PipeWarning, match="^one worker has all .* has, 2 layers"):
        Pipe(copy.deepcopy(TWO), 4)
    Pipe(copy.deepcopy(TWO), 4, balance=[2])


@pytest.mark.parametrize(
    ("module", "options"),
    [
        (TWO, {"chunks": 2}),
        (TWO, {"devices": ["cpu"]}),
        (TWO, {"balance": [2]}),
        (TWO, {"schedule": fill_drain(1, 1)}),
        (nn.Sequential(WithDevice(nn.Linear(2, 2), "cpu"), nn.Linear(2, 2)), {}),
        (ONE, {"balance": [1]}),
        (ONE, {"devices": ["cpu"]}),
        (nn.Sequential(), {}),
    ],
)
def test_what_was_asked_for_is_no_surprise(module: nn.Sequential, options: dict[str, Any]) -> None:
    Pipe(copy.deepcopy(module), **options)  # warnings are errors


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # parts of PyTorch that torch.compile imports
def test_a_module_that_was_compiled_as_a_whole() -> None:
    module = copy.deepcopy(TWO)
    module.compile(backend="eager")
    text = r"^Sequential\.compile\(\) was called before the pipe was made, which calls the layers one by one"
    with pytest.warns(PipeWarning, match=text):
        Pipe(module, 2, devices=["cpu", "cpu"])
    for layer in (layers := copy.deepcopy(TWO)):
        layer.compile(backend="eager")
    Pipe(layers, 2, devices=["cpu", "cpu"])
