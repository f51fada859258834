"""A small training that writes down when a fault struck and when each rank raised, and what is to be expected of it."""

import contextlib
import dataclasses
import functools
import json
import math
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn import functional

from pipework import Mesh, Pipe, save_checkpoint
from tests.injection import Fault
from tests.jobs import Ended, Job

DETECT = 3.0  # seconds of silence, where that is what tells
BOUND = 2.0  # seconds, until all know of what closes a connection or raises
PATIENCE = 3.0  # what bounds are multiplied by, as others may use the machine; a benchmark tells the real times


def model(stages: int = 4) -> nn.Sequential:
    return nn.Sequential(*[layer for _ in range(stages) for layer in (nn.Linear(8, 8), nn.Tanh())])


def mean_square(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return functional.mse_loss(output, target)


def small_pipe(mesh: Mesh, **options: Any) -> Pipe:
    return Pipe(model(), chunks=2, loss_fn=mean_square, mesh=mesh, schedule="1f1b", **options)


def note_strikes(folder: str, rank: int) -> None:
    """From now on, faults write down when they strike."""
    strike = Fault.strike

    @functools.wraps(strike)
    def noted(fault: Fault) -> None:
        if not Path(folder, f"struck.{rank}").exists():
            note_strike(folder, rank)
        strike(fault)

    Fault.strike = noted  # type: ignore[method-assign]


def note_strike(folder: str, rank: int | str) -> None:
    Path(folder, f"struck.{rank}").write_text(str(time.time()))


def train(mesh: Mesh, folder: str, schedule: str = "1f1b") -> list[float]:
    """What a script does; with a checkpoint after the second step."""
    return _train(mesh, folder, model(), schedule, saves=True)


def tensor_parallel(mesh: Mesh, folder: str) -> list[float]:
    """Ranks 0 and 1 compute the first stage together, 2 and 3 the second."""
    device_mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "tp"))
    layers = model()
    for layer in layers[::2]:
        parallelize_module(layer, device_mesh["tp"], ColwiseParallel(output_layouts=Replicate()))
    return _train(dataclasses.replace(mesh, device_mesh=device_mesh), folder, layers)


def fully_sharded(mesh: Mesh, folder: str, whole_stages: int | None = None) -> list[float]:
    """Ranks 0 and 1 share the weights of the first stage, 2 and 3 those of the second."""
    device_mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    layers = model()
    for layer in layers[::2]:
        fully_shard(layer, mesh=device_mesh["dp"])
    return _train(dataclasses.replace(mesh, device_mesh=device_mesh, whole_stages=whole_stages), folder, layers)


def _train(
    mesh: Mesh, folder: str, layers: nn.Sequential, schedule: str = "1f1b", *, saves: bool = False
) -> list[float]:
    note_strikes(folder, mesh.rank)
    pipe = Pipe(layers, chunks=4, schedule=schedule, loss_fn=mean_square, mesh=mesh)
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
    losses = []
    with noting(folder, mesh.rank):
        for step in range(4):
            x = torch.randn(8, 8, generator=torch.Generator().manual_seed(step))
            loss = pipe(x, target=x.roll(1, 1))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            if saves and step == 1:
                save_checkpoint(Path(folder) / "checkpoints", pipe, optimizer, step=step + 1)
    return losses


@contextlib.contextmanager
def noting(folder: str, rank: int) -> Iterator[None]:
    """Writes down when a rank raises what."""
    try:
        yield
    except BaseException as error:
        content = {
            "time": time.time(),
            "type": type(error).__name__,
            "text": str(error),
            **{name: getattr(error, name, None) for name in ("rank", "where", "kind", "traceback_text")},
            "notes": getattr(error, "__notes__", []),
        }
        Path(folder, f"raised.{rank}").write_text(json.dumps(content))
        raise


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

    def run(
        ranks: int, fault: str, *, body: Callable[..., Any] = train, but: Collection[int] = (), **options: Any
    ) -> Outcome:
        job = start(ranks, body, environment={"PIPEWORK_FAULT": fault}, folder=str(tmp_path), **options)
        return outcome(job, tmp_path, but)

    return run


def assert_clean_exit(ended: Ended) -> None:
    """A process has ended by itself, with one report of what happened."""
    for word in ("terminate called", "Fatal Python error", "Segmentation", "core dumped"):
        assert word not in ended.errors, ended.errors
    assert ended.code > 0, f"{ended.code}\n{ended.errors}"
