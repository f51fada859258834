r"""A small ResNet with torchgpipe, as in 2019: every shortcut is a skip connection. Nothing here knows pipework.

    python -m pipework.compat examples/old/resnet_skips.py          # half a minute on two CPU cores

A pipeline needs a flat nn.Sequential, so that it can be cut anywhere, even in the middle of a residual block:

    Fork --> convolution --> batch norm --> ReLU --> convolution --> batch norm --> Join --> ReLU
       \------------------------------- "shortcut" ------------------------------/

Each block has a namespace, because all of them use the same name. `balance_by_time` measures where to cut; batch
norms take their running statistics from whole mini-batches. The script draws the pictures: a disk, a square or a cross,
and much noise. Two GPUs are used if there are two, else the CPU.
"""

import argparse
import time

import torch
from torch import nn
from torchgpipe import GPipe
from torchgpipe.balance import balance_by_time
from torchgpipe.skip import Namespace, pop, skippable, stash

parser = argparse.ArgumentParser(description="A small ResNet in a pipeline, as it was written in 2019.")
parser.add_argument("--steps", type=int, default=120, metavar="N", help="mini-batches to train on (%(default)s)")
parser.add_argument("--batch-size", type=int, default=64, metavar="N", help="pictures of a mini-batch (%(default)s)")
parser.add_argument("--size", type=int, default=16, metavar="N", help="pixels of a picture's side (%(default)s)")
parser.add_argument("--width", type=int, default=16, metavar="N", help="channels of the first blocks (%(default)s)")
parser.add_argument("--blocks", type=int, default=1, metavar="N", help="blocks of each width (%(default)s)")
parser.add_argument("--seed", type=int, default=0, metavar="N", help="of all that is random (%(default)s)")

SHAPES = ["disk", "square", "cross"]


# ---- Model -----------------------------------------------------------------------------------------------------------
@skippable(stash=["shortcut"])
class Fork(nn.Module):
    """The beginning of a residual block."""

    def forward(self, x):
        yield stash("shortcut", x)
        return x


@skippable(pop=["shortcut"])
class Join(nn.Module):
    """The end of a residual block. If the number of channels grows, it brings the shortcut to the new shape."""

    def __init__(self, before, channels, stride):
        super().__init__()
        self.fit = nn.Identity()
        if before != channels:
            self.fit = nn.Sequential(nn.Conv2d(before, channels, 1, stride, bias=False), nn.BatchNorm2d(channels))

    def forward(self, x):
        shortcut = yield pop("shortcut")
        return x + self.fit(shortcut)


def block(before, channels):
    namespace = Namespace()
    stride = 1 if before == channels else 2
    return [
        Fork().isolate(namespace),
        nn.Conv2d(before, channels, 3, stride, padding=1, bias=False),
        nn.BatchNorm2d(channels),
        nn.ReLU(),
        nn.Conv2d(channels, channels, 3, padding=1, bias=False),
        nn.BatchNorm2d(channels),
        Join(before, channels, stride).isolate(namespace),
        nn.ReLU(),
    ]


def resnet(width, blocks):
    layers = [nn.Conv2d(1, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
    before = width
    for channels in (width, 2 * width, 4 * width):
        for _ in range(blocks):
            layers += block(before, channels)
            before = channels
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(before, len(SHAPES)))


# ---- Pictures --------------------------------------------------------------------------------------------------------
def draw(count, size):
    """Pictures, and the number of the shape that each shows."""
    kinds = torch.randint(len(SHAPES), (count,))
    row, column = (torch.empty(count, 1, 1).uniform_(size * 0.3, size * 0.7) for _ in range(2))
    radius = torch.empty(count, 1, 1).uniform_(size * 0.15, size * 0.3)
    line = torch.arange(size, dtype=torch.float32)
    y, x = (line.view(1, -1, 1) - row).abs(), (line.view(1, 1, -1) - column).abs()
    disk = x**2 + y**2 < radius**2
    square = torch.maximum(x, y) < radius * 0.9
    cross = (torch.minimum(x, y) < radius * 0.3) & (torch.maximum(x, y) < radius)
    pictures = torch.stack([disk, square, cross], dim=1).float()[torch.arange(count), kinds]
    return pictures.unsqueeze(1) + 0.3 * torch.randn(count, 1, size, size), kinds


def accuracy(model, pictures, kinds):
    model.eval()
    with torch.no_grad():
        output = model(pictures.to(model.devices[0], non_blocking=True))
    return (output.argmax(1).cpu() == kinds).float().mean().item()


def main():
    options = parser.parse_args()
    torch.manual_seed(options.seed)
    devices = ["cuda:0", "cuda:1"] if torch.cuda.device_count() >= 2 else ["cpu", "cpu"]
    model = resnet(options.width, options.blocks)

    sample, _ = draw(options.batch_size // 8, options.size)
    balance = balance_by_time(len(devices), model, sample, device=devices[0])
    model = GPipe(model, balance, devices=devices, chunks=8, deferred_batch_norm=True)
    print(f"{len(model)} layers, of which {' and '.join(map(str, balance))} are on {devices}", flush=True)

    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, options.steps)
    held_out = draw(512, options.size)
    print(f"before: {accuracy(model, *held_out):.1%} of {len(held_out[1])} pictures are told apart", flush=True)
    start = time.time()
    model.train()
    for step in range(1, options.steps + 1):
        pictures, kinds = draw(options.batch_size, options.size)
        output = model(pictures.to(model.devices[0], non_blocking=True))
        loss = nn.functional.cross_entropy(output, kinds.to(model.devices[-1], non_blocking=True))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        if step % 20 == 0:
            print(f"step {step}  loss {loss.item():.3f}", flush=True)
    seconds = time.time() - start
    print(f"after:  {accuracy(model, *held_out):.1%}; {options.steps * options.batch_size / seconds:.0f} pictures/s")


if __name__ == "__main__":
    main()
