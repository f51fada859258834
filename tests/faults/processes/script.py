"""An ordinary training script: under torchrun it goes on after faults, and leaves in order when it is asked to."""

import argparse
import os
import sys
import time
from pathlib import Path

import torch
from torch import nn
from torch.distributed.elastic.multiprocessing.errors import record

import pipework
from pipework import Mesh, Pipe, load_checkpoint, save_checkpoint
from tests import injection


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=9)
    parser.add_argument("--pause", type=float, default=0.0)
    parser.add_argument("--detect", type=float, default=10.0)
    parser.add_argument("--record", action="store_true", help="tell torchrun of exceptions")
    parser.add_argument("--heedless", action="store_true", help="never ask whether to stop")
    arguments = parser.parse_args()
    injection.install()
    torch.set_num_threads(1)
    torch.optim.SGD([torch.zeros(1)])  # imports much
    train(
        pipework.init(detect=arguments.detect),
        arguments.folder,
        arguments.steps,
        arguments.pause,
        heedless=arguments.heedless,
    )


def train(mesh: Mesh | None, folder: str, steps: int, pause: float = 0.0, *, heedless: bool = False) -> None:
    place = Path(folder)
    rank, attempt = os.environ.get("RANK", "0"), os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    torch.manual_seed(0)
    layers = [nn.Linear(8, 16), nn.Tanh(), nn.Dropout(0.2), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 8)]
    pipe = Pipe(nn.Sequential(*layers), chunks=4, schedule="1f1b", loss_fn=nn.functional.mse_loss, mesh=mesh)
    note(place / f"joined.{attempt}.{rank}", time.time())
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=0.01)
    found = load_checkpoint(place / "checkpoints", pipe, optimizer)
    step = found.step if found else 0
    stopping = False
    while step < steps and not stopping:
        x = torch.randn(8, 8, generator=torch.Generator().manual_seed(step))
        loss = pipe(x, target=x.roll(1, 1))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        note(place / f"step.{attempt}.{rank}", f"{step} {time.time()}")
        time.sleep(pause)
        stopping = not heedless and pipe.stopping
        if step % 3 == 0 or stopping:
            save_checkpoint(place / "checkpoints", pipe, optimizer, step=step, keep=2)


def note(path: Path, what: object) -> None:
    part = path.with_suffix(path.suffix + ".part")
    part.write_text(str(what))
    part.replace(path)


if __name__ == "__main__":
    (record(main) if "--record" in sys.argv else main)()
