"""Trains a small GPT in a pipeline, byte by byte, on the source text of Python's own standard library.

    python examples/train_gpt.py               # about two minutes on two CPU cores; uses every accelerator it finds
    torchrun --nproc-per-node 2 examples/train_gpt.py    # the same in two processes, with the same loss curve
    python examples/train_gpt.py --compare     # then also: how much faster than without a pipeline?
    python examples/train_gpt.py --schedule interleaved-1f1b --stages 4    # any schedule; the loss curve is the same
    python examples/train_gpt.py --data book.txt --stages 4 --steps 2000
    python examples/train_gpt.py --resume runs/gpt-1

Ctrl-C leaves a checkpoint that --resume continues with the same loss curve, in as many processes as you like.
Needs: pip install ".[train]"  # from a checkout
"""

import argparse
import copy
import json
import math
import os
import re
import signal
import statistics
import sys
import sysconfig
import time
from importlib.util import find_spec
from itertools import count
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import pipework
from pipework import Mesh, Pipe
from pipework.schedule import SCHEDULES

CONTEXT, HEADS = 128, 4  # bytes that the model sees at a time; attention heads
LEARNING_RATE, WARM_UP = 3e-3, 15  # the highest rate; steps until then
CHECKPOINT_EVERY = 50  # steps


def fail(message: object) -> NoReturn:
    if os.environ.get("RANK", "0") != "0":
        sys.exit()  # All processes find the same mistake; the first one reports it.
    print(f"train_gpt.py: {message}", file=sys.stderr)
    sys.exit(2)


def positive(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text} is no whole number above 0")
    return int(text)


parser = argparse.ArgumentParser(description="Trains a small GPT in a pipeline.")
parser.error = fail  # one line, without the usage
add, modes = parser.add_argument, ["never", "except_last", "always"]
training = [name for name in SCHEDULES if name != "forward-only"]
add("--schedule", choices=training, default="1f1b", help="in which order the workers work (%(default)s)")
add("--steps", type=positive, default=200, metavar="N", help="mini-batches to train on (%(default)s)")
add(
    "--stages",
    type=positive,
    metavar="N",
    help="partitions (as many as suit the processes or accelerators, else 2 to 4)",
)
add("--chunks", type=positive, default=8, metavar="N", help="micro-batches in a mini-batch (%(default)s)")
add("--checkpoint", choices=modes, default="never", help="what to recompute to save memory (%(default)s)")
add("--batch-size", type=positive, default=32, metavar="N", help="rows of text in a mini-batch (%(default)s)")
add("--width", type=positive, default=192, metavar="N", help="features of the model (%(default)s)")
add("--layers", type=positive, default=4, metavar="N", help="transformer blocks (%(default)s)")
add("--seed", type=int, default=0, metavar="N", help="of all that is random (%(default)s)")
add("--data", type=os.path.abspath, metavar="FILE", help="train on this text instead of the standard library")
add("--out", metavar="FOLDER", help="a new folder for the run (the first free one of runs/gpt-1, ..)")
add("--resume", metavar="FOLDER", help="resume the run in this folder, with its options")
add("--compare", action="store_true", help="at the end, time the pipeline against the plain model")


# ---- Data: bytes -----------------------------------------------------------------------------------------------------
def read_text(file: str | None) -> Tensor:
    if file:
        text = Path(file).read_bytes()
    else:
        library = Path(sysconfig.get_path("stdlib"))
        left_out = {"site-packages", "dist-packages", "test", "tests", "encodings", "pydoc_data"}
        files = sorted(path for path in library.rglob("*.py") if left_out.isdisjoint(path.relative_to(library).parts))
        text = b"\n".join(path.read_bytes() for path in files)
    if len(text) < 10 * (CONTEXT + 1):
        fail(f"the text has {len(text)} bytes and needs at least {10 * (CONTEXT + 1)}")
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def draw_batch(text: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """Random rows and, as targets, the byte after each of their bytes."""
    starts = torch.randint(len(text) - CONTEXT, (rows, 1))
    windows = text[starts + torch.arange(CONTEXT + 1)].long()
    return windows[:, :-1], windows[:, 1:]


def bigram_loss(text: Tensor, x: Tensor, y: Tensor) -> float:
    """The loss, in nats per byte, of counting in the training text how often each byte follows each other one."""
    counts = 1.0 + torch.bincount(text[:-1].long() * 256 + text[1:], minlength=256 * 256).view(256, 256)
    return -(counts / counts.sum(1, keepdim=True)).log()[x, y].mean().item()


# ---- Model: an nn.Sequential, whose layers Pipe distributes ----------------------------------------------------------
class Embedding(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.byte = nn.Embedding(256, width)
        # Sines, as in the first transformer: in so few steps learned positions would hardly help.
        angles = torch.arange(CONTEXT)[:, None] / 1000 ** (torch.arange(0, width, 2) / width)
        self.register_buffer("position", torch.cat([angles.sin(), angles.cos()], dim=1))

    def forward(self, x: Tensor) -> Tensor:
        return self.byte(x) + self.position[: x.size(1)]


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


def gpt(width: int, layers: int) -> nn.Sequential:
    head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 256))
    return nn.Sequential(Embedding(width), *(Block(width) for _ in range(layers)), head)


def loss_fn(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), target.flatten())


class Plain(nn.Sequential):  # the model without a pipeline, called as a pipe is
    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return loss_fn(super().forward(x), target.to(x.device))

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        return nn.utils.clip_grad_norm_(self.parameters(), max_norm)


# ---- Training: nothing here knows whether the model is a pipe, or in how many processes ------------------------------
def train_step(model: Pipe | Plain, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> float:
    optimizer.zero_grad()
    loss = model(x, target=y)  # in a pipe, this runs the whole schedule
    loss.backward()
    model.clip_grad_norm_(1.0)  # in a pipe, by the norm of the gradients of all processes
    optimizer.step()
    return loss.item()


@torch.no_grad()
def write_sample(pipe: Pipe, prompt: bytes, length: int = 300, temperature: float = 0.8) -> str:
    row = torch.tensor([list(prompt)])
    for _ in range(length):
        logits = pipe(row[:, -CONTEXT:], outputs="all")[0, -1].cpu()  # all processes draw the same next byte
        row = torch.cat([row, torch.multinomial((logits / temperature).softmax(0), 1)[None]], dim=1)
    return re.sub(r"[^\n -~]", "?", bytes(row[0].tolist()).decode("latin-1"))


def show_progress(step: int, steps: int, loss: float, speed: float, left: float) -> None:
    words = f"step {step}/{steps}  loss {loss:.3f}  {speed:,.0f} tokens/s  {left // 60:.0f}:{left % 60:02.0f} left"
    if sys.stdout.isatty():  # one line, written over and over
        bar = "━" * (20 * step // steps)
        print(f"\r{bar:─<20}  {words}\x1b[K", end="\n" if step == steps else "", flush=True)
    elif step % math.ceil(steps / 10) == 0 or step == steps:
        print(words, flush=True)


def compare(pipe: Pipe, optimizer: torch.optim.Optimizer, text: Tensor, rows: int) -> None:
    """Times steps of the pipeline and of the plain model in turns, so that other load affects both."""
    accelerators, threads = torch.accelerator.device_count(), torch.get_num_threads()
    plain = Plain(*copy.deepcopy(list(pipe))).to(pipe.input_device)
    plain_optimizer = torch.optim.AdamW(plain.parameters(), fused=True)
    plain_ways = {"one accelerator": threads} if accelerators else {"one core": 1, "all cores": threads}
    ways = {"the pipeline": (pipe, optimizer, threads)}
    ways |= {f"the plain model on {where}": (plain, plain_optimizer, share) for where, share in plain_ways.items()}
    times: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(12):
        x, y = draw_batch(text, rows)
        for way, (model, its_optimizer, its_threads) in ways.items():
            torch.set_num_threads(its_threads)
            start = time.perf_counter()
            train_step(model, its_optimizer, x.to(pipe.input_device), y)
            for device in range(accelerators):
                torch.accelerator.synchronize(device)
            times[way].append(time.perf_counter() - start)
    medians = {way: statistics.median(seconds[2:]) for way, seconds in times.items()}  # the first two warm up
    print("comparison     speed-up by the pipeline; median of ten steps each, in turns")
    for way, median in medians.items():
        print(f"{median / medians['the pipeline']:19.2f}  {1000 * median:5.0f} ms  {way}")


# ---- Options: checked before any work --------------------------------------------------------------------------------
def checked_options(argv: list[str] | None, processes: int) -> argparse.Namespace:
    """Also makes the folder of a new run, which is `options.run`."""
    options = parser.parse_args(argv)
    if options.resume:
        try:
            saved = json.loads(Path(options.resume, "options.json").read_text())
            options = parser.parse_args(argv, argparse.Namespace(**saved))
            fixed = {name: saved[name] for name in ("batch_size", "width", "layers", "seed", "data", "out")}
        except (OSError, ValueError, TypeError, KeyError) as error:
            fail(f"--resume: cannot load {options.resume}/options.json ({type(error).__name__})")
        for name, value in fixed.items():
            if getattr(options, name) != value:
                fail(f"--{name.replace('_', '-')} is {value} in {options.resume}, and stays so")
    if find_spec("safetensors") is None:
        fail("checkpoints are kept in safetensors files, and safetensors is not installed: pip install '.[train]'")
    if options.width % HEADS:
        fail(f"--width is {options.width}: it must be a multiple of {HEADS}, the number of attention heads")
    of_each = SCHEDULES[options.schedule].stages_per_worker
    stages = options.stages or processes * of_each
    if options.stages and processes and stages != processes * of_each:
        fail(f"--stages is {stages}: {processes} processes with {options.schedule} have {processes * of_each}")
    if options.stages and stages % of_each:
        fail(f"--stages is {stages}: with {options.schedule} each worker has {of_each} of them")
    if stages > options.layers + 2:
        fail(f"--stages is {stages}: there are only {options.layers + 2} layers, with embedding and head")
    if options.compare and processes:
        fail("--compare is for one process: start it without torchrun")
    try:
        read_text(options.data)
        free = (folder for number in count(1) if not os.path.exists(folder := f"runs/gpt-{number}"))
        options.run = options.resume or options.out or next(free)
        Path(options.run).mkdir(parents=True, exist_ok=bool(options.resume))
    except OSError as error:
        fail(f"{error.filename}: {error.strerror}")
    return options


def options_of_all(argv: list[str] | None, mesh: Mesh | None) -> argparse.Namespace:
    """The first process checks the options and sends them to the others, so a mistake prints one line."""
    if mesh is None:
        return checked_options(argv, 0)
    if mesh.rank > 0:
        sent = mesh.store.get("options")  # waits until it is there
        if not sent:
            sys.exit()  # The first process has reported why.
        return argparse.Namespace(**json.loads(sent))
    sent = ""
    try:
        options = checked_options(argv, len(mesh.ranks))
        sent = json.dumps(vars(options))
    finally:
        mesh.store.set("options", sent)
    return options


# ---- From top to bottom ----------------------------------------------------------------------------------------------
def main(argv: list[str] | None = None) -> int:
    mesh = pipework.init()  # None, unless torchrun has started this process as one of several
    options = options_of_all(argv, mesh)
    first_process, run, steps = mesh is None or mesh.rank == 0, Path(options.run), options.steps
    text = read_text(options.data)
    train_text, test_text = text.tensor_split([-(len(text) // 10)])

    torch.manual_seed(options.seed)
    model = gpt(options.width, options.layers)
    found = torch.accelerator.device_count()
    workers = 0 if mesh else (options.stages or 0) // SCHEDULES[options.schedule].stages_per_worker
    devices = [worker * found // workers if found else "cpu" for worker in range(workers)] or None

    # ---- This line makes it a pipeline; the rest would be the same with the model itself ----
    settings = {"schedule": options.schedule, "checkpoint": options.checkpoint, "devices": devices, "mesh": mesh}
    pipe = Pipe(model, options.chunks, loss_fn=loss_fn, **settings)
    optimizer = torch.optim.AdamW(pipe.parameters(), betas=(0.9, 0.98), weight_decay=0.1, fused=True)
    try:
        checkpoint = pipework.load_checkpoint(run / "checkpoints", pipe, optimizer) if options.resume else None
    except (OSError, RuntimeError, ValueError) as error:
        fail(f"--resume: {' '.join(str(error).split())}")
    first = checkpoint.step if checkpoint else 0
    if steps <= first:
        fail(f"{options.resume} has finished {first} steps: give --steps a higher number")
    metrics = run / "metrics.jsonl"
    if first_process:
        kept = metrics.read_text().splitlines(keepends=True)[:first] if first else []
        metrics.write_text("".join(kept))
        (run / "options.json").write_text(json.dumps(vars(options), indent=1))
        print(pipe)
        print(f"{len(text):,} bytes of text, the last tenth held out; writing into {run}", flush=True)

    again = f"torchrun --nproc-per-node {len(mesh.ranks)}" if mesh else os.path.relpath(sys.executable)
    to_go_on = f"to go on: {again} {sys.argv[0]} --resume {run}"
    step = saved = first  # steps that are done, and those of the last checkpoint

    def tell(text: str) -> None:
        if first_process:
            os.write(1, f"\n{text}\n".encode())  # A signal may come in the middle of a print.

    def handle_signals(handler: Any) -> None:
        for number in (signal.SIGINT, signal.SIGTERM):  # Ctrl-C; a cluster that takes its machine back
            signal.signal(number, handler)

    def interrupt(number: int, _: object) -> None:
        tell("stopping after this step, saving; press again to end at once without a checkpoint")
        pipe.request_stop()  # All processes finish the running step, so that the checkpoint is complete.
        handle_signals(end_now)  # At a second Ctrl-C, torchrun sends SIGTERM.

    def end_now(number: int, _: object) -> None:
        lost = "the running step is" if step == saved else f"{step - saved} steps and the running one are"
        tell(f"ended without a checkpoint: {lost} lost, the last checkpoint has {saved} steps; {to_go_on}")
        handle_signals(signal.SIG_DFL)
        os.kill(os.getpid(), number)

    handle_signals(interrupt)
    start = time.perf_counter()
    while step < steps:
        torch.manual_seed(1_000_000 * options.seed + step)  # Random numbers depend on the step, so resuming is exact.
        x, y = draw_batch(train_text, options.batch_size)
        rate = LEARNING_RATE * min(1.0, (step + 1) / WARM_UP) * (0.55 + 0.45 * math.cos(math.pi * step / steps))
        optimizer.param_groups[0]["lr"] = rate
        loss = train_step(pipe, optimizer, x, y)

        step += 1
        seconds = (time.perf_counter() - start) / (step - first)
        speed = x.numel() / seconds
        if first_process:
            line = {"step": step, "loss": loss, "learning_rate": rate, "tokens_per_second": round(speed)}
            with metrics.open("a") as file:
                print(json.dumps(line), file=file)
            show_progress(step, steps, loss, speed, left=(steps - step) * seconds)
        stopping = pipe.stopping  # the same in all processes
        if stopping or step == steps or step % CHECKPOINT_EVERY == 0:
            pipework.save_checkpoint(run / "checkpoints", pipe, optimizer, step=step, keep=2)
            saved = step
        if stopping and step < steps:
            if first_process:
                print(f"\nstopped after step {step}; {to_go_on}", flush=True)
            return 130
    handle_signals(signal.SIG_DFL)  # Everything is saved: from here on, Ctrl-C ends the process.

    # Records five more steps, at rate 0, which does not change the model, to measure the pipeline.
    optimizer.param_groups[0]["lr"] = 0.0
    with pipe.record() as recording:
        for _ in range(5):
            train_step(pipe, optimizer, *draw_batch(train_text, options.batch_size))

    # Tests the model.
    pipe.eval()
    torch.manual_seed(0)
    x, y = draw_batch(test_text, 512)
    with torch.no_grad():
        loss = pipe(x, target=y).item()
    sample = write_sample(pipe, b"def ").replace("\n", "\n               ")
    if not first_process:
        return 0  # Each process knows the results; the first one prints them.
    recording.save(run / "timeline.svg")  # the last step
    recording.save(run / "trace.json")  # all five
    print(f"\nsample         {sample}")
    print(f"\nheld-out loss  {loss:.3f} nats per byte")
    print(f"               {bigram_loss(train_text, x, y):.3f} if one knew only the byte before (bigram baseline)")

    print(f"speed          {speed:,.0f} tokens/s (a token is a byte)")
    print(f"bubble         {recording.bubble():.1%} measured, {recording.predicted().bubble:.1%} predicted")
    print("memory         worker  parameters  activations (most at a time)")
    ends = [sum(pipe.balance[: stage + 1]) for stage in range(len(pipe.balance))]
    partitions = [model[end - layers : end] for end, layers in zip(ends, pipe.balance, strict=True)]
    for worker in range(len(pipe.devices)):
        held = [partitions[stage] for stage in pipe.schedule().stages_of(worker)]
        size = sum(each.nbytes for partition in held for each in partition.parameters())
        most = recording.timeline().peak_memory(worker)
        print(f"               {worker:<6}  {size / 2**20:6.2f} MiB  {most / 2**20:6.2f} MiB")
    print(f"files          {run}: metrics.jsonl, options.json, checkpoints, timeline.svg, trace.json")
    if options.compare:
        pipe.train()
        compare(pipe, optimizer, train_text, options.batch_size)
    return 0


if __name__ == "__main__":
    sys.exit(main())
