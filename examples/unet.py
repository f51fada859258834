"""Trains a U-Net in a pipeline: it learns which pixels of a noisy drawing belong to a disk, and which to a square.

    python examples/unet.py                     # less than a minute on two CPU cores; uses every accelerator it finds
    python examples/unet.py --timeline unet.svg --checkpoint always
    python examples/unet.py --balance 9 12 14         # three stages

On the way down, each level of a U-Net keeps its picture for the same level on the way up:

    32 x 32    conv conv stash ------------------------------------------> pop conv conv    classes
    16 x 16                  conv conv stash -------------------> pop conv conv
     8 x 8                                 conv conv conv conv

In a pipeline `stash` and `pop` send these tensors straight to the partition that needs them, past those in between.
Nothing is downloaded: the script draws the pictures. Needs: pip install ".[train]"  # from a checkout
"""

import argparse
import math
import signal
import sys
import time
from collections.abc import Generator
from pathlib import Path
from typing import NoReturn

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pipework import Pipe, balance_by_time, pop, skippable, stash
from pipework.skip import Namespace

CLASSES = ["background", "disk", "square"]
HELD_OUT = 256  # pictures for the test, which are not trained on


def fail(message: object) -> NoReturn:
    print(f"unet.py: {message}", file=sys.stderr)
    sys.exit(2)


def positive(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text} is no whole number above 0")
    return int(text)


def picture(text: str) -> Path:
    if not text.endswith((".svg", ".json")):
        raise argparse.ArgumentTypeError(f"{text} must end in .svg (picture) or .json (trace for ui.perfetto.dev)")
    if not Path(text).parent.is_dir():  # better an error now than after the training
        raise argparse.ArgumentTypeError(f"there is no folder {Path(text).parent}")
    return Path(text)


parser = argparse.ArgumentParser(description="Trains a U-Net in a pipeline.")
parser.error = fail  # one line, without the usage
add, modes = parser.add_argument, ["never", "except_last", "always"]
add("--steps", type=positive, default=200, metavar="N", help="mini-batches to train on (%(default)s)")
add("--stages", type=positive, metavar="N", help="partitions (one for each accelerator, else 2 CPU workers)")
add("--balance", type=positive, nargs="+", metavar="N", help="layers of each partition (found by measuring)")
add("--chunks", type=positive, default=8, metavar="N", help="micro-batches in a mini-batch (%(default)s)")
add("--checkpoint", choices=modes, default="never", help="what to recompute to save memory (%(default)s)")
add("--batch-size", type=positive, default=32, metavar="N", help="pictures in a mini-batch (%(default)s)")
add("--size", type=positive, default=32, metavar="N", help="pixels of a picture's side (%(default)s)")
add("--width", type=positive, default=12, metavar="N", help="channels of the top level; doubled below (%(default)s)")
add("--levels", type=positive, default=3, metavar="N", help="levels of the U-Net (%(default)s)")
add("--seed", type=int, default=0, metavar="N", help="of all that is random (%(default)s)")
add("--timeline", type=picture, metavar="FILE", help="save what the workers do in one step (.svg or .json)")


# ---- Data: drawings, and the class of each pixel ---------------------------------------------------------------------
def draw(count: int, size: int) -> tuple[Tensor, Tensor]:
    """Pictures, each with a disk, a square and much noise, and the class of each pixel."""
    across = torch.arange(size).float()
    x, y = across.view(1, 1, size), across.view(1, size, 1)
    classes = torch.zeros(count, size, size, dtype=torch.long)
    for shape in (1, 2):
        radius = (0.1 + 0.12 * torch.rand(count, 1, 1)) * size
        center_x, center_y = (radius + torch.rand(count, 1, 1) * (size - 2 * radius) for _ in range(2))
        aside, above = (x - center_x).abs(), (y - center_y).abs()
        inside = aside**2 + above**2 < radius**2 if shape == 1 else torch.maximum(aside, above) < 0.88 * radius
        classes = torch.where(inside, shape, classes)
    brightness = (classes > 0) * (0.6 + 0.4 * torch.rand(count, 1, 1))  # the same for both shapes
    return (brightness + 0.3 * torch.randn(count, size, size)).unsqueeze(1), classes


# ---- Model: an nn.Sequential, whose layers Pipe distributes ----------------------------------------------------------
@skippable(stash=["picture"])
class Down(nn.Module):
    """Stashes the picture for the way up, and returns one of half the size."""

    def forward(self, x: Tensor) -> Generator[stash, None, Tensor]:
        yield stash("picture", x)
        return F.max_pool2d(x, 2)


@skippable(pop=["picture"])
class Up(nn.Module):
    """Doubles the size, and concatenates the stashed channels."""

    def forward(self, x: Tensor) -> Generator[pop, Tensor, Tensor]:
        kept = yield pop("picture")
        return torch.cat([F.interpolate(x, scale_factor=2.0), kept], dim=1)


def convolutions(inside: int, outside: int) -> list[nn.Module]:
    layers: list[nn.Module] = []
    for channels in (inside, outside):
        layers += [nn.Conv2d(channels, outside, 3, padding=1, bias=False), nn.BatchNorm2d(outside), nn.ReLU()]
    return layers


def levels(inside: int, width: int, count: int) -> list[nn.Module]:
    """A level, with all lower levels between its way down and its way up. It ends with `width` channels."""
    if count == 1:
        return convolutions(inside, width)
    own = Namespace()  # Every level uses the name "picture"; a namespace for each level keeps them apart.
    return [
        *convolutions(inside, width),
        Down().isolate(own),
        *levels(width, 2 * width, count - 1),
        Up().isolate(own),
        *convolutions(2 * width + width, width),
    ]


def unet(width: int, count: int) -> nn.Sequential:
    return nn.Sequential(*levels(1, width, count), nn.Conv2d(width, len(CLASSES), 1))


# ---- Training: nothing here knows whether the model is a pipe --------------------------------------------------------
def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> float:
    model.train()
    optimizer.zero_grad()
    logits = model(x)
    loss = F.cross_entropy(logits, y.to(logits.device))
    loss.backward()
    optimizer.step()
    return loss.item()


@torch.no_grad()
def evaluate(model: nn.Module, x: Tensor, y: Tensor) -> tuple[float, list[float], Tensor]:
    """The loss, the intersection over union of each shape, and the predicted class of each pixel."""
    model.eval()
    logits = model(x).cpu()
    guess = logits.argmax(1)
    shapes = range(1, len(CLASSES))
    ious = [(((guess == c) & (y == c)).sum() / ((guess == c) | (y == c)).sum()).item() for c in shapes]
    return F.cross_entropy(logits, y).item(), ious, guess


def show(x: Tensor, y: Tensor, guess: Tensor) -> None:
    """Prints one picture in letters: the input, the true shapes, the prediction."""
    seen = (x[0] * 4).long().clamp(0, 4)
    for row in range(0, len(y), 2):  # a letter is about twice as high as wide
        columns = ["".join(" .:+#"[c] for c in seen[row].tolist())]
        columns += ["".join(".O#"[c] for c in each[row].tolist()) for each in (y, guess)]
        print("   ".join(columns))


def show_progress(step: int, steps: int, loss: float, seconds: float) -> None:
    left = (steps - step) * seconds / step
    words = f"step {step}/{steps}  loss {loss:.3f}  {1000 * seconds / step:.0f} ms/step  {left:.0f} s left"
    if sys.stdout.isatty():  # one line, written over and over
        print(f"\r{words}\x1b[K", end="\n" if step == steps else "", flush=True)
    elif step % math.ceil(steps / 10) == 0 or step == steps:
        print(words, flush=True)


# ---- From top to bottom ----------------------------------------------------------------------------------------------
def main(argv: list[str] | None = None) -> int:
    options = parser.parse_args(argv)
    if options.size % 2 ** (options.levels - 1):
        fail(f"--size is {options.size}: {options.levels} levels need a multiple of {2 ** (options.levels - 1)}")
    torch.manual_seed(options.seed)
    model = unet(options.width, options.levels)
    found = torch.accelerator.device_count()
    stages = len(options.balance or ()) or options.stages or found or 2
    if options.balance and (sum(options.balance) != len(model) or options.stages not in (None, stages)):
        fail(f"--balance is {options.balance}: one number for each stage is wanted, {len(model)} layers in all")
    if stages > len(model):
        fail(f"--stages is {stages}: there are only {len(model)} layers")
    x, _ = draw(max(1, options.batch_size // options.chunks), options.size)  # one micro-batch
    balance = options.balance or balance_by_time(stages, model, x)
    devices = [stage * found // stages if found else "cpu" for stage in range(stages)]

    # ---- This line makes it a pipeline. Batch norms take their running statistics from the whole mini-batch ----
    pipe = Pipe(model, options.chunks, options.checkpoint, deferred_batch_norm=True, balance=balance, devices=devices)
    print(pipe, flush=True)
    optimizer = torch.optim.AdamW(pipe.parameters())
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.01, total_steps=options.steps)

    torch.manual_seed(options.seed + 1_000_000)
    test_x, test_y = draw(HELD_OUT, options.size)
    torch.manual_seed(options.seed)
    before, _, _ = evaluate(pipe, test_x, test_y)

    interrupted = False

    def interrupt(*_: object) -> None:
        nonlocal interrupted
        interrupted = True  # The running step ends, then the model is tested.
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # A second Ctrl-C does not wait.

    previous = signal.signal(signal.SIGINT, interrupt)
    start = time.perf_counter()
    for step in range(1, options.steps + 1):
        x, y = draw(options.batch_size, options.size)
        loss = train_step(pipe, optimizer, x, y)
        scheduler.step()
        show_progress(step, options.steps, loss, time.perf_counter() - start)
        if interrupted:
            print(f"\nstopped after step {step}")
            break
    signal.signal(signal.SIGINT, previous)

    loss, ious, guess = evaluate(pipe, test_x, test_y)
    print("\nA drawing that was held out; its shapes; what the model says (O disk, # square)")
    show(test_x[0], test_y[0], guess[0])
    print(f"\nheld-out loss {loss:.3f}, before the training {before:.3f}")
    shapes = ", ".join(f"{name} {iou:.2f}" for name, iou in zip(CLASSES[1:], ious, strict=True))
    print(f"intersection over union: {shapes}")
    if options.timeline:
        with pipe.record() as recording:
            train_step(pipe, optimizer, *draw(options.batch_size, options.size))
        recording.save(options.timeline)
        print(f"bubble {recording.bubble():.0%}, predicted {recording.predicted().bubble:.0%}: {options.timeline}")
    return 130 if interrupted else 0


if __name__ == "__main__":
    sys.exit(main())
