"""Captured steps on several devices: streams order the copies between graphs, and static tensors must be filled.

The stand-in records the operators of a device, too, and replays them in the stream that is current. It has no pool:
memory that a later graph uses again, for which messages are copied out of static tensors, is not shown.
"""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from pipework import Pipe
from pipework.runtime.graphs.static_tensor import StaticTensor
from tests.accelerator import simulated

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("recorded_graphs")]

WIDTH, STEPS = 16, 8


def losses(*, graphs: bool, devices: Sequence[str] = ("sim:0", "sim:1")) -> list[Tensor]:
    """Of some steps, whose inputs are made just before and overwritten just after."""
    torch.manual_seed(0)
    layers = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4)))
    pipe = Pipe(
        layers, 4, balance=[1] * 4, devices=devices, schedule="interleaved-1f1b", loss_fn=mse_loss, graphs=graphs
    )
    optimizer = torch.optim.SGD(pipe.parameters(), 0.1)
    found = []
    for step in range(STEPS):
        x = torch.full((8, WIDTH), 0.25 * (step + 1), device="sim:0").cumsum(0)
        y = torch.ones(8, WIDTH, device=devices[1])
        found.append(pipe(x, target=y))
        found[-1].backward()
        for each in (x, y):
            each.fill_(torch.nan)
        optimizer.step()
        optimizer.zero_grad()
    if graphs:
        assert pipe.graphs is not None
        assert pipe.graphs[:3] == (1, STEPS - 5, 4)
    return [each.detach().cpu() for each in found]


@pytest.mark.parametrize("second", ["sim:0", "sim:1"])
def test_a_captured_step_is_the_eager_one_and_nothing_races(second: str) -> None:
    """Of two workers on one device, too, each of which has a stream."""
    simulated.configure(delay_probability=0.3, delay_us=2000, poison=2)
    devices = "sim:0", second
    torch.testing.assert_close(
        losses(graphs=True, devices=devices), losses(graphs=False, devices=devices), rtol=0, atol=0
    )


def test_a_static_tensor_that_is_not_filled_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = losses(graphs=False)
    monkeypatch.setattr(StaticTensor, "fill", lambda static, tensor: None)
    assert not all(map(torch.equal, losses(graphs=True), expected))
    simulated.synchronize_all()
    assert simulated.poison_reads()
