"""Memory of a device runs out in a step: what the error says, and that afterwards all is as before."""

import gc
import re
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional

from pipework import Pipe
from tests.accelerator import simulated

pytestmark = pytest.mark.gpu

MIB = 2**20
WIDTH = 256
DEVICES = [torch.device("sim", 0), torch.device("sim", 1)]


def block() -> nn.Sequential:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))


class Run:
    """A pipe on two devices, of which one gets just the memory that a small mini-batch has needed."""

    def __init__(self, schedule: str, *, inside: bool, full: int) -> None:
        self.inside = inside
        stages = 4 if schedule in ("interleaved-1f1b", "zb-v") else 2
        self.pipe = Pipe(
            nn.Sequential(*(block() for _ in range(4))), 8, "never", balance=[4 // stages] * stages, devices=DEVICES,
            schedule=schedule, loss_fn=functional.mse_loss,
        )  # fmt: skip
        self.optimizer = torch.optim.SGD(self.pipe.parameters(), lr=0.01, momentum=0.9)
        self.small = self.batch(64)
        self.small_bytes = self.small[0].nbytes
        self.large = self.batch(1024)
        self.step(*self.small)
        self.gradients = self.step(*self.small, update=False)
        self.limit(full)

    def limit(self, device: int, more: int = 2 * MIB) -> None:
        gc.collect()  # what earlier tests have left would make room later
        torch.accelerator.empty_cache()
        limits = [0, 0]
        limits[device] = torch.accelerator.memory_reserved(device) + more
        simulated.configure(memory_limit=limits)

    def batch(self, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        torch.manual_seed(rows)
        return torch.randn(rows, WIDTH).to(DEVICES[0]), torch.randn(rows, WIDTH).to(DEVICES[1])

    def step(self, x: torch.Tensor, y: torch.Tensor, *, update: bool = True) -> list[torch.Tensor]:
        loss = self.pipe(x, target=y) if self.inside else functional.mse_loss(self.pipe(x), y)
        loss.backward()
        gradients = [parameter.grad.cpu() for parameter in self.pipe.parameters()]
        if update:
            self.optimizer.step()
        self.pipe.zero_grad()
        return gradients


def allocated() -> list[int]:
    gc.collect()
    return [torch.accelerator.memory_allocated(device) for device in DEVICES]


def notes_of(run: Callable[[], object]) -> list[str]:
    with pytest.raises(torch.OutOfMemoryError) as caught:
        run()
    assert type(caught.value) is torch.OutOfMemoryError
    return list(caught.value.__notes__)


def rows_of(note: str) -> dict[str, list[str]]:
    cells = [re.split("  +", line.strip()) for line in note.splitlines()[1:]]
    return {row[0]: row[1:] for row in cells}


@pytest.mark.parametrize("full", [0, 1])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved-1f1b", "zb-v", "outside"])
def test_the_error_says_where_and_what_is_held(schedule: str, full: int) -> None:
    run = Run("gpipe" if schedule == "outside" else schedule, inside=schedule != "outside", full=full)
    before = allocated()
    notes = notes_of(lambda: run.step(*run.large))
    (where,) = [note for note in notes if "memory of the stages" in note]
    place, stage = re.search(r"out of memory in (stage (\d), micro-batch \d, action \w);", where).groups()
    assert f"pipework: {place}" in notes
    table = rows_of(where)
    sent = f"pipework: no memory on sim:{full} for a tensor that was sent there"
    assert sent in notes or table[stage][0] == f"sim:{full}"
    assert table["stage"] == ["device", "weights", "gradients", "buffers", "micro-batches"]
    stages = len(run.pipe.balance)
    for number in range(stages):
        weights = sum(each.nbytes for each in run.pipe.partitions[number].parameters())
        assert table[str(number)][1] == (f"{weights / MIB:.3g} MiB" if weights >= MIB else f"{weights / 1024:.0f} KiB")
    assert any(row[4] != "-" for name, row in table.items() if name.isdigit())
    assert where.splitlines()[-1].startswith("  pipe.predict says")
    del notes
    assert allocated() == before
    # As if nothing had happened.
    for got, expected in zip(run.step(*run.small, update=False), run.gradients, strict=True):
        assert torch.equal(got, expected)
    assert allocated() == before
