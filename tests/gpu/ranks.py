"""One of two ranks that train, or both in one process as threads; test_nccl.py starts it, and compares.

    python -m tests.gpu.ranks RESULT

It writes losses, norms and digests of gradients, and at last when it had finished, by the system's clock.
"""

import hashlib
import json
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import pipework
from pipework import Mesh, Pipe, PipeWarning
from pipework.schedule import schedule_spec

SCHEDULES = ("gpipe", "1f1b", "interleaved-1f1b", "zb-h1", "zb-v", "dualpipe-v")
CAPTURED = ("1f1b", "zb-v")  # once more, with graphs in the ranks if there is a card
WORKERS, CHUNKS, STEPS = 2, 8, 3
WIDTH, ROWS, LAYERS = 256, 128, 8


def digest(tensor: Tensor) -> str:
    return hashlib.sha256(tensor.detach().cpu().view(torch.uint8).numpy().tobytes()).hexdigest()


def pipe_of(schedule: str, mesh: Mesh | None, devices: list[torch.device], *, graphs: bool = False) -> Pipe:
    """Dropout in each layer, and recomputation of all micro-batches but the last."""
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Dropout(0.1)) for _ in range(LAYERS)]
    stages = WORKERS * schedule_spec(schedule).stages_per_worker
    where: dict[str, Any] = {"devices": devices} if mesh is None else {"mesh": mesh}
    return Pipe(
        nn.Sequential(*blocks), CHUNKS, "except_last", schedule=schedule, loss_fn=F.cross_entropy,
        balance=[LAYERS // stages] * stages, graphs=graphs, **where,
    )  # fmt: skip


def train(pipe: Pipe, device: torch.device, steps: int = STEPS) -> dict[str, Any]:
    """A few steps of SGD."""
    torch.manual_seed(1)
    x, y = torch.randn(ROWS, WIDTH), torch.randint(WIDTH, (ROWS,))
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
    losses, norms = [], []
    gradients: dict[str, str] = {}
    for _ in range(steps):
        optimizer.zero_grad()
        loss = pipe(x.to(device), target=y.to(device))
        loss.backward()
        norms.append(float(pipe.clip_grad_norm_(1e9)))  # scales by 1
        losses.append(loss.item().hex())
        gradients = {name: digest(each.grad) for name, each in pipe.named_parameters() if each.grad is not None}
        optimizer.step()
    replayed = 0 if pipe.graphs is None else pipe.graphs.replayed
    return {"losses": losses, "norms": norms, "gradients": gradients, "replayed": replayed}


def main() -> None:
    warnings.simplefilter("ignore", PipeWarning)  # two workers on one card are meant
    mesh = pipework.init()
    if mesh is not None:
        devices = [mesh.device]
    elif torch.cuda.is_available():
        devices = [torch.device("cuda", number % torch.cuda.device_count()) for number in range(WORKERS)]
    else:
        devices = [torch.device("cpu")] * WORKERS
    found: dict[str, Any] = {name: train(pipe_of(name, mesh, devices), devices[0]) for name in SCHEDULES}
    graphs = mesh is not None and devices[0].type == "cuda"
    for name in CAPTURED:
        found[f"{name}, captured"] = train(pipe_of(name, mesh, devices, graphs=graphs), devices[0], 2 * STEPS + 1)
    found["backend"] = None if mesh is None else torch.distributed.get_backend_config()
    found["finished"] = time.time()
    Path(sys.argv[1]).write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main()
