"""Trains a small GPT in a pipeline, byte by byte, on the source text of Python's own standard library.

    python examples/train_gpt.py               # about two minutes on two CPU cores; uses every accelerator it finds
    python examples/train_gpt.py --compare     # then also: how much faster than without a pipeline?
    python examples/train_gpt.py --data book.txt --stages 4 --steps 2000
    python examples/train_gpt.py --resume runs/gpt-1

Ctrl-C leaves a checkpoint that --resume continues with the same loss curve. Needs: pip install "pipework[train]"
"""

import argparse
import contextlib
import copy
import json
import math
import os
import shlex
import signal
import statistics
import sys
import sysconfig
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor, nn
from torch.nn import functional as F

from pipework import Pipe

HEADS = 4
LEARNING_RATE, WARM_UP = 2e-3, 50  # the highest one; steps
CHECKPOINT_EVERY, RECORDED = 100, 5  # steps: how often; how many at the end are recorded for the timeline
MAY_CHANGE = {"steps", "stages", "chunks", "checkpoint"}  # at --resume: how much is computed and how, but not what


def fail(message: str) -> NoReturn:
    print(f"train_gpt.py: {message}", file=sys.stderr)
    raise SystemExit(2)


# ---- Options ---------------------------------------------------------------------------------------------------------


def read_options(argv: list[str] | None) -> tuple[argparse.Namespace, dict[str, Any]]:
    """The options; and the checkpoint to go on from, empty for a new run."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.error = fail  # type: ignore[method-assign]  # one line
    add = parser.add_argument
    number: dict[str, Any] = {"type": int, "metavar": "N"}
    add("--steps", **number, default=700, help="mini-batches to train on (%(default)s)")
    add("--stages", **number, help="partitions of the model (all accelerators, else 2 to 4 workers that share the CPU)")
    add("--chunks", **number, default=8, help="micro-batches in a mini-batch (%(default)s)")
    modes = ["never", "except_last", "always"]
    add("--checkpoint", choices=modes, default="never", help="which micro-batches to recompute to save memory")
    add("--batch-size", **number, default=16, help="rows in a mini-batch (%(default)s)")
    add("--context", **number, default=128, help="bytes in a row (%(default)s)")
    add("--width", **number, default=128, help="numbers that stand for a byte inside the model (%(default)s)")
    add("--layers", **number, default=4, help="transformer blocks (%(default)s)")
    add("--seed", **number, default=0, help="of all that is random (%(default)s)")
    add("--data", type=os.path.abspath, metavar="FILE", help="train on this text instead")
    settings = set(vars(parser.parse_args([])))  # what belongs to a run and is kept in its checkpoint
    add("--out", type=Path, metavar="FOLDER", help="of the run (the first free one of runs/gpt-1, runs/gpt-2, ..)")
    add("--resume", type=Path, metavar="FOLDER", help="continue the run in this folder, with its options")
    add("--compare", action="store_true", help="at the end, time the pipeline against the plain model")
    options, state = parser.parse_args(argv), {}
    if options.resume:
        state = load_checkpoint(options.resume)
        parser.set_defaults(**state["options"])
        options = parser.parse_args(argv)
        for name, value in state["options"].items():
            if name not in MAY_CHANGE and getattr(options, name) != value:
                fail(f"--{name.replace('_', '-')} is {value} in {options.resume}, and --resume cannot change it")
        if options.steps <= state["step"]:
            fail(f"{options.resume} has {state['step']} steps behind it: to go on, give --steps more than that")
        if options.out:
            fail("--resume goes on writing into the same folder: leave --out out")
    for name in ("steps", "stages", "chunks", "batch_size", "context", "width", "layers"):
        if getattr(options, name) is not None and getattr(options, name) < 1:
            fail(f"--{name.replace('_', '-')} is {getattr(options, name)}: it must be at least 1")
    if options.width % HEADS:
        fail(f"--width is {options.width}: it must be a multiple of {HEADS}, the number of attention heads")
    if options.stages and options.stages > options.layers + 2:
        fail(f"--stages is {options.stages}: it must be at most {options.layers + 2}, the blocks, embedding and head")
    if options.out and (options.out / "metrics.jsonl").exists():
        fail(f"--out {options.out} holds a run already: --resume {options.out} continues it, or name another folder")
    options.settings = {name: getattr(options, name) for name in settings}
    return options, state


# ---- Data: bytes, of which the last tenth is held out ----------------------------------------------------------------


def read_text(file: str | None, context: int) -> bytes:
    if file is None:
        file = sysconfig.get_paths()["stdlib"]
        left_out = {"site-packages", "dist-packages", "test", "tests", "encodings", "pydoc_data"}
        paths = sorted(path for path in Path(file).rglob("*.py") if left_out.isdisjoint(path.relative_to(file).parts))
        text = b"\n".join(path.read_bytes() for path in paths)
    else:
        try:
            text = Path(file).read_bytes()
        except OSError as error:
            fail(f"cannot read --data {file}: {error.strerror}")
    if len(text) // 10 <= context:
        fail(f"{file} has {len(text)} bytes of text: --context {context} needs at least {10 * context + 10}")
    return text


def draw_batch(text: Tensor, rows: int, context: int, *seed: object) -> tuple[Tensor, Tensor]:
    """Random rows and, for each byte in them, the next one. Depends on nothing but the arguments: resuming is exact."""
    generator = torch.Generator().manual_seed(zlib.crc32(repr(seed).encode()))
    starts = torch.randint(len(text) - context, (rows, 1), generator=generator)
    windows = text[starts + torch.arange(context + 1)].long()
    return windows[:, :-1], windows[:, 1:]


def bigram_loss(text: Tensor, x: Tensor, y: Tensor) -> float:
    """Nats per byte if one only counts, in the training text, how often each byte follows each other one."""
    counts = 1.0 + torch.bincount(text[:-1].long() * 256 + text[1:], minlength=256 * 256).view(256, 256)
    return -(counts / counts.sum(1, keepdim=True)).log()[x, y].mean().item()


# ---- Model: an nn.Sequential, whose layers are what Pipe shares out --------------------------------------------------


class Embedding(nn.Module):
    def __init__(self, context: int, width: int) -> None:
        super().__init__()
        self.byte, self.position = nn.Embedding(256, width), nn.Embedding(context, width)
        nn.init.normal_(self.byte.weight, std=0.02)
        nn.init.normal_(self.position.weight, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        return self.byte(x) + self.position.weight[: x.size(1)]


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query_key_value, self.mix = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.query_key_value(self.norm1(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.mix(attended.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


def build_model(options: argparse.Namespace) -> nn.Sequential:
    width = options.width
    head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 256))
    return nn.Sequential(Embedding(options.context, width), *(Block(width) for _ in range(options.layers)), head)


def build_pipe(model: nn.Sequential, options: argparse.Namespace) -> Pipe:
    """The only lines about pipelines; without --stages, Pipe itself chooses the devices."""
    stages, devices = options.stages, None
    if stages:
        accelerators = torch.accelerator.device_count()
        devices = [stage * accelerators // stages for stage in range(stages)] if accelerators else ["cpu"] * stages
    return Pipe(model, chunks=options.chunks, checkpoint=options.checkpoint, devices=devices)


# ---- Training --------------------------------------------------------------------------------------------------------


def build_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), betas=(0.9, 0.98), weight_decay=0.1, fused=True)


def learning_rate(step: int, steps: int) -> float:
    """Linear warm-up; half a cosine, down to a tenth."""
    return LEARNING_RATE * min(1.0, (step + 1) / WARM_UP) * (0.55 + 0.45 * math.cos(math.pi * step / steps))


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor, rate: float) -> float:
    for group in optimizer.param_groups:
        group["lr"] = rate
    optimizer.zero_grad()
    logits = model(x)
    loss = F.cross_entropy(logits.flatten(0, 1), y.to(logits.device).flatten())
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return loss.item()


@contextlib.contextmanager
def progress(first: int, steps: int) -> Iterator[Callable[[int, float, float], None]]:
    """Yields what to call after each step: it moves a bar in a terminal, elsewhere it prints ten plain lines."""
    console, start = Console(), time.perf_counter()
    if sys.stdout.isatty() and console.is_interactive:
        words = "step {task.completed}/{task.total}  loss {task.fields[loss]:.3f}  {task.fields[speed]:,.0f} tokens/s "
        columns = BarColumn(20), TextColumn(words), TimeRemainingColumn(), TextColumn("left")
        with Progress(*columns, console=console) as bar:
            task = bar.add_task("", total=steps, completed=first, loss=math.nan, speed=math.nan)
            yield lambda step, loss, speed: bar.update(task, completed=step, loss=loss, speed=speed)
        return

    def show(step: int, loss: float, speed: float) -> None:
        if step % math.ceil(steps / 10) == 0 or step == steps:
            left = (time.perf_counter() - start) / (step - first) * (steps - step)
            print(f"step {step}/{steps}  loss {loss:.3f}  {speed:,.0f} tokens/s  {left:.0f} s left", flush=True)

    yield show


# ---- The folder of a run ---------------------------------------------------------------------------------------------


def open_run(options: argparse.Namespace, steps_done: int) -> Path:
    """The folder to write into; one that is resumed loses the metrics of steps after its checkpoint."""
    taken = [0, *(int(path.name[4:]) for path in Path("runs").glob("gpt-*") if path.name[4:].isdecimal())]
    run: Path = options.resume or options.out or Path("runs", f"gpt-{max(taken) + 1}")
    try:
        run.mkdir(parents=True, exist_ok=bool(options.resume or options.out))
        with (run / "metrics.jsonl").open("a+") as metrics:
            metrics.seek(0)
            lines = metrics.readlines()[:steps_done]
            metrics.truncate(0)
            metrics.writelines(lines)
    except OSError as error:
        fail(f"cannot write into the folder of the run: {error}")
    return run


def load_checkpoint(folder: Path) -> dict[str, Any]:
    if not (folder / "checkpoint.pt").is_file():
        fail(f"--resume {folder}: there is no checkpoint.pt; name the folder of a run, such as runs/gpt-1")
    try:
        state = torch.load(folder / "checkpoint.pt", map_location="cpu", weights_only=True)
        return {name: state[name] for name in ("step", "model", "optimizer", "random", "options", "text")}
    except Exception as error:
        fail(f"--resume {folder}: its checkpoint.pt is damaged or not of this script ({type(error).__name__})")


# ---- Report ----------------------------------------------------------------------------------------------------------


@torch.no_grad()
def evaluate(pipe: Pipe, x: Tensor, y: Tensor, rows: int) -> float:
    """Nats per byte."""
    pipe.eval()
    batches = zip(x.split(rows), y.split(rows), strict=True)
    losses = [F.cross_entropy(pipe(x).flatten(0, 1).cpu(), y.flatten(), reduction="sum").item() for x, y in batches]
    return sum(losses) / y.numel()


@torch.no_grad()
def write_text(pipe: Pipe, prompt: bytes, length: int, context: int, temperature: float = 0.8) -> str:
    pipe.eval()
    generator, row = torch.Generator().manual_seed(0), torch.tensor([list(prompt)])
    for _ in range(length):
        logits = pipe(row[:, -context:])[0, -1].cpu()
        byte = torch.multinomial((logits / temperature).softmax(0), 1, generator=generator)
        row = torch.cat([row, byte[None]], dim=1)
    text = bytes(row[0].tolist()).decode(errors="replace")
    return "".join(letter if letter.isprintable() or letter == "\n" else "?" for letter in text)


def report(pipe: Pipe, recording: Any, folder: Path) -> None:
    measured, predicted, last = recording.bubble(), recording.predicted().bubble, recording.timeline()
    print(f"""\
bubble         {measured:.1%} measured, {predicted:.1%} predicted (over the last {len(recording.steps)} steps)
               It is the part of a step in which workers wait for each other:
               more --chunks, less bubble. The prediction leaves out the loss,
               for which all wait halfway, and what else the machine had to do.
memory         stage  device  parameters  activations (most at a time)""")
    for stage, (partition, device) in enumerate(zip(pipe.partitions, pipe.devices, strict=True)):
        size, most = sum(each.nbytes for each in partition.parameters()), last.peak_memory(stage)
        print(f"               {stage:<5}  {device!s:6}  {size / 2**20:6.2f} MiB  {most / 2**20:6.2f} MiB")
    print(f"""\
files          {folder}/metrics.jsonl  loss of each step
               {folder}/checkpoint.pt  --resume {folder} goes on
               {folder}/timeline.svg   predicted and measured
               {folder}/trace.json     for https://ui.perfetto.dev""")


def compare(options: argparse.Namespace, text: Tensor, rounds: int = 10) -> None:
    """Times training steps of the pipeline and of the plain model by turns, so that all see the same machine."""
    plain, threads = build_model(options), torch.get_num_threads()
    pipe = build_pipe(copy.deepcopy(plain), options)
    ways: dict[str, tuple[nn.Module, int]] = {"the pipeline": (pipe, threads)}
    if torch.accelerator.is_available():
        plain.to(torch.accelerator.current_accelerator())
        ways["the plain model on one accelerator"] = (plain, threads)
    else:
        for count in sorted({threads, max(1, threads // len(pipe.devices))}, reverse=True):
            ways[f"the plain model, {count} thread{'s'[: count - 1]}"] = (plain, count)
    optimizers = {model: build_optimizer(model) for model, _ in ways.values()}
    times: dict[str, list[float]] = {name: [] for name in ways}
    for step in range(2 + rounds):
        x, y = draw_batch(text, options.batch_size, options.context, options.seed, step)
        for name, (model, count) in ways.items():
            torch.set_num_threads(count)
            start = time.perf_counter()
            train_step(model, optimizers[model], x.to(next(model.parameters()).device), y, LEARNING_RATE)
            for device in range(torch.accelerator.device_count()):
                torch.accelerator.synchronize(device)
            times[name].append(time.perf_counter() - start)
    torch.set_num_threads(threads)
    medians = {name: statistics.median(seconds[2:]) for name, seconds in times.items()}  # the first two warm up
    print(f"comparison     medians of {rounds} steps, by turns")
    for name, seconds in medians.items():
        speed_up = "" if name == "the pipeline" else f", speed-up {seconds / medians['the pipeline']:.2f}"
        print(f"               {1000 * seconds:.1f} ms a step with {name}{speed_up}")
    if not torch.accelerator.is_available():
        print("               Cores of one CPU can share each operation; several devices cannot.")


# ---- From top to bottom ----------------------------------------------------------------------------------------------


def main(argv: list[str] | None = None) -> int:
    options, state = read_options(argv)
    text = read_text(options.data, options.context)
    checksum, steps, first = zlib.crc32(text), options.steps, state.get("step", 0)
    if state and state["text"] != checksum:
        fail(f"--resume {options.resume}: the text has changed since that run began")
    train_text, test_text = torch.frombuffer(bytearray(text), dtype=torch.uint8).tensor_split([-(len(text) // 10)])
    run = open_run(options, first)

    torch.manual_seed(options.seed)
    pipe = build_pipe(build_model(options), options)
    optimizer = build_optimizer(pipe)
    if state:
        pipe.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        torch.set_rng_state(state["random"])
    print(pipe)
    print(f"{len(text):,} bytes of text, the last tenth held out; writing into {run}", flush=True)

    def save(step: int) -> None:
        state = {"step": step, "model": pipe.state_dict(), "optimizer": optimizer.state_dict()}
        state |= {"random": torch.get_rng_state(), "options": options.settings, "text": checksum}
        torch.save(state, run / "checkpoint.part")
        os.replace(run / "checkpoint.part", run / "checkpoint.pt")  # the old one or the new, never half a one

    interrupted = False

    def interrupt(*_: object) -> None:
        """Ctrl-C lets the running step end, so that the checkpoint is whole; a second one stops at once."""
        nonlocal interrupted
        interrupted = True
        signal.signal(signal.SIGINT, signal.default_int_handler)

    average, start = math.nan, time.perf_counter()
    before = signal.signal(signal.SIGINT, interrupt)
    with (
        (run / "metrics.jsonl").open("a", buffering=1) as metrics,
        progress(first, steps) as show,
        contextlib.ExitStack() as last_steps,
    ):
        for step in range(first, steps):
            if step == max(first, steps - RECORDED):
                recording = last_steps.enter_context(pipe.record())
            x, y = draw_batch(train_text, options.batch_size, options.context, options.seed, step)
            rate = learning_rate(step, steps)
            loss = train_step(pipe, optimizer, x, y, rate)
            average = loss if step == first else 0.9 * average + 0.1 * loss
            speed = (step + 1 - first) * y.numel() / (time.perf_counter() - start)
            line = {"step": step + 1, "loss": loss, "learning_rate": rate, "tokens_per_second": round(speed)}
            metrics.write(json.dumps(line) + "\n")
            show(step + 1, average, speed)
            if interrupted or step + 1 == steps or (step + 1) % CHECKPOINT_EVERY == 0:
                save(step + 1)
            if interrupted:
                break
    signal.signal(signal.SIGINT, before)
    if step + 1 < steps:
        print(f"\nstopped after step {step + 1} of {steps}, which is in {run / 'checkpoint.pt'}; to go on:")
        print(shlex.join(["python", sys.argv[0], "--resume", str(run)]))
        return 130

    recording.save(run / "timeline.svg")
    recording.save(run / "trace.json")
    x, y = draw_batch(test_text, math.ceil(100_000 / options.context), options.context, "held out")
    held_out_loss = evaluate(pipe, x, y, options.batch_size)
    sample = write_text(pipe, b"def ", 300, options.context)
    print("\nsample         " + sample.replace("\n", "\n               "))
    print(f"\nheld-out loss  {held_out_loss:.3f} nats per byte")
    print(f"               {bigram_loss(train_text, x, y):.3f} if one knew only the byte before (bigram baseline)")
    print(f"speed          {speed:,.0f} tokens/s (a token is a byte)")
    report(pipe, recording, run)
    if options.compare:
        compare(options, train_text)
    return 0


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        sys.exit(main())
    sys.exit(130)
