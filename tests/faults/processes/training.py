"""A small training that writes down when a fault struck and when each rank raised, and what is to be expected of it."""

import functools
import json
import math
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from pipework import Mesh, Pipe, save_checkpoint
from tests.injection import Fault
from tests.jobs import Ended, Job

DETECT = 3.0  # seconds of silence, where that is what tells
BOUND = 2.0  # seconds, until all know of what closes a connection or raises
PATIENCE = 3.0  # what bounds are multiplied by, as others may use the machine; a benchmark tells the real times
CODES = {"error": 71, "left": 71, "disagreement": 71, "stuck": 71, "lost": 72}


def model(stages: int = 4) -> nn.Sequential:
    layers = [layer for _ in range(stages) for layer in (nn.Linear(8, 8), nn.Tanh())]
    return nn.Sequential(*layers)


def mean_square(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return functional.mse_loss(output, target)


def note_strikes(folder: str, rank: int) -> None:
    """From now on, faults write down when they strike."""
    strike = Fault.strike

    @functools.wraps(strike)
    def noted(fault: Fault) -> None:
        path = Path(folder, f"struck.{rank}")
        if not path.exists():
            path.write_text(str(time.time()))
        strike(fault)

    Fault.strike = noted  # type: ignore[method-assign]


def train(mesh: Mesh, folder: str, steps: int = 4, schedule: str = "1f1b", **options: Any) -> dict[str, Any]:
    """What a script does; with a checkpoint after the second step."""
    return train_layers(mesh, folder, model(options.pop("stages", 4)), steps, schedule, saves=True, **options)


def train_layers(
    mesh: Mesh,
    folder: str,
    layers: nn.Sequential,
    steps: int = 4,
    schedule: str = "1f1b",
    *,
    saves: bool = False,
    **options: Any,
) -> dict[str, Any]:
    """The same with given layers, and perhaps without a checkpoint."""
    note_strikes(folder, mesh.rank)
    pipe = Pipe(layers, chunks=4, schedule=schedule, loss_fn=mean_square, mesh=mesh, **options)
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
    losses = []
    try:
        for step in range(steps):
            x = torch.randn(8, 8, generator=torch.Generator().manual_seed(step))
            loss = pipe(x, target=x.roll(1, 1))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            if saves and step == 1:
                save_checkpoint(Path(folder) / "checkpoints", pipe, optimizer, step=step + 1)
    except BaseException as error:
        note_error(folder, mesh.rank, error)
        raise
    return {"losses": losses}


def note_error(folder: str, rank: int, error: BaseException) -> None:
    """Writes down when a rank raised what."""
    content = {
        "time": time.time(),
        "type": type(error).__name__,
        "text": str(error),
        **{name: getattr(error, name, None) for name in ("rank", "where", "kind", "traceback_text")},
        "notes": getattr(error, "__notes__", []),
    }
    Path(folder, f"raised.{rank}").write_text(json.dumps(content))


@dataclass(frozen=True)
class Raised:
    """What a rank raised.

    Attributes:
        seconds: after the fault.
    """

    seconds: float
    type: str
    text: str
    rank: int | None
    where: str | None
    kind: str | None
    traceback_text: str | None
    notes: list[str]


@dataclass(frozen=True)
class Outcome:
    """How a job has ended."""

    raised: dict[int, Raised]
    ended: list[Ended]
    folder: Path

    @property
    def seconds(self) -> float:
        """From the fault until all others had raised."""
        return max((each.seconds for each in self.raised.values()), default=math.inf)


def outcome(job: Job, folder: Path, but: Collection[int] = ()) -> Outcome:
    """Waits for a job."""
    ended = job.ended(but)
    struck = [float(path.read_text()) for path in folder.glob("struck.*")]
    begin = min(struck, default=math.nan)
    raised = {}
    for path in folder.glob("raised.*"):
        content = json.loads(path.read_text())
        raised[int(path.suffix[1:])] = Raised(content.pop("time") - begin, **content)
    return Outcome(raised, ended, folder)


Failing = Callable[..., Outcome]


@pytest.fixture
def failing(start: Callable[..., Job], tmp_path: Path) -> Failing:
    """Trains with a fault."""
    return functools.partial(_failing, start, tmp_path)


def _failing(
    start: Callable[..., Job],
    folder: Path,
    ranks: int,
    fault: str,
    *,
    body: Callable[..., Any] = train,
    but: Collection[int] = (),
    init: dict[str, Any] | None = None,
    **options: Any,
) -> Outcome:
    job = start(
        ranks,
        body,
        init=init,
        environment={"PIPEWORK_FAULT": fault},
        folder=str(folder),
        **options,
    )
    return outcome(job, folder, but)


def assert_clean_exit(ended: Ended) -> None:
    """A process has ended by itself, with one report of what happened."""
    for word in ("terminate called", "Fatal Python error", "Segmentation", "core dumped"):
        assert word not in ended.errors, ended.errors
    assert ended.code > 0, f"{ended.code}\n{ended.errors}"
