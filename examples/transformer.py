"""Trains a transformer language model in a pipeline, word by word, on the reference documentation of Python.

    python examples/transformer.py              # a minute or two on two CPU cores; uses every accelerator it finds
    python examples/transformer.py --plain      # the same training without a pipeline: the loop does not change
    python examples/transformer.py --data book.txt --vocabulary 5000 --epochs 20 --save best.pt

The model of the epoch with the lowest validation loss is kept, and tested at the end. Ctrl-C ends the training early.
Needs: pip install ".[train]"  # from a checkout
"""

import argparse
import math
import re
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple, NoReturn

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pipework import Pipe

HEADS = 4  # attention heads of a layer
UNKNOWN, END = "<unknown>", "<end>"  # a word that is not in the vocabulary; the end of a paragraph


def fail(message: object) -> NoReturn:
    print(f"{Path(sys.argv[0]).name}: {message}", file=sys.stderr)
    sys.exit(2)


def positive(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text} is no whole number above 0")
    return int(text)


def share(text: str) -> float:
    if not re.fullmatch(r"0|0?\.\d+", text):
        raise argparse.ArgumentTypeError(f"{text} is no number from 0 to below 1")
    return float(text)


def writable(text: str) -> Path:
    if not Path(text).parent.is_dir():  # better an error now than after the training
        raise argparse.ArgumentTypeError(f"there is no folder {Path(text).parent}")
    return Path(text)


def picture(text: str) -> Path:
    if not text.endswith((".svg", ".json")):
        raise argparse.ArgumentTypeError(f"{text} must end in .svg (picture) or .json (trace for ui.perfetto.dev)")
    return writable(text)


def options_of_training(description: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description)
    parser.error = fail  # one line, without the usage
    add, modes = parser.add_argument, ["never", "except_last", "always"]
    add("--epochs", type=positive, default=6, metavar="N", help="passes through the training text (%(default)s)")
    add("--steps", type=positive, metavar="N", help="at most so many mini-batches in an epoch (all)")
    add("--stages", type=positive, metavar="N", help="partitions (one for each accelerator, else 2 to 4 CPU workers)")
    add("--chunks", type=positive, default=8, metavar="N", help="micro-batches in a mini-batch (%(default)s)")
    add("--checkpoint", choices=modes, default="never", help="what to recompute to save memory (%(default)s)")
    add("--batch-size", type=positive, default=16, metavar="N", help="rows of text in a mini-batch (%(default)s)")
    add("--context", type=positive, default=64, metavar="N", help="words that the model sees at a time (%(default)s)")
    add("--width", type=positive, default=96, metavar="N", help="features of a word (%(default)s)")
    add("--layers", type=positive, default=4, metavar="N", help="encoder layers (%(default)s)")
    add("--dropout", type=share, default=0.1, metavar="P", help="share of features that is dropped (%(default)s)")
    add("--rate", type=float, default=1.0, metavar="X", help="learning rate of the first epoch (%(default)s)")
    add("--vocabulary", type=positive, default=2000, metavar="N", help="words the model knows (%(default)s)")
    add("--seed", type=int, default=0, metavar="N", help="of all that is random (%(default)s)")
    add("--data", metavar="FILE", help="train on this text instead of the documentation")
    add("--timeline", type=picture, metavar="FILE", help="save what the workers do in one step (.svg or .json)")
    return parser


def check(options: argparse.Namespace) -> None:
    if options.width % HEADS:
        fail(f"--width is {options.width}: it must be a multiple of {HEADS}, the number of attention heads")
    if options.stages and options.stages > options.layers + 2:
        fail(f"--stages is {options.stages}: there are only {options.layers + 2} layers, with embedding and decoder")


# ---- Data: numbers that stand for words ------------------------------------------------------------------------------
class Corpus(NamedTuple):
    words: list[str]  # the vocabulary: number -> word
    train: Tensor
    valid: Tensor
    test: Tensor


def read_paragraphs(file: str | None) -> list[str]:
    if file:
        try:
            texts = [Path(file).read_text(errors="replace")]
        except OSError as error:
            fail(f"{error.filename}: {error.strerror}")
    else:
        from pydoc_data.topics import topics  # what help("lambda") prints: a part of every Python

        texts = [topics[name] for name in sorted(topics)]
    # Some topics repeat parts of others. Each paragraph counts once, so that no held-out text is trained on.
    return list(dict.fromkeys(paragraph for text in texts for paragraph in text.split("\n\n") if paragraph.strip()))


def read_corpus(options: argparse.Namespace) -> Corpus:
    """Of every 50 paragraphs, 40 are for training, 5 for validation, and 5 for the test."""
    parts: dict[str, list[str]] = {"train": [], "valid": [], "test": []}
    for number, paragraph in enumerate(read_paragraphs(options.data)):
        part = {8: "valid", 9: "test"}.get(number // 5 % 10, "train")
        parts[part] += [*re.findall(r"\w+|[^\w\s]", paragraph.lower()), END]
    frequent = Counter(parts["train"]).most_common(options.vocabulary - 1)
    words = [UNKNOWN, *(word for word, _ in frequent)]
    numbers = {word: number for number, word in enumerate(words)}
    tokens = {name: torch.tensor([numbers.get(word, 0) for word in text]) for name, text in parts.items()}
    for name, text in tokens.items():
        if len(text) < 2 * options.batch_size:
            fail(f"the text has {len(text)} words for --batch-size {options.batch_size} ({name}): too few")
    return Corpus(words, **tokens)


def batchify(tokens: Tensor, rows: int) -> Tensor:
    """Cuts the text into rows of equal length, which are read side by side; the rest is dropped."""
    return tokens[: len(tokens) // rows * rows].view(rows, -1)


def get_batch(text: Tensor, start: int, context: int) -> tuple[Tensor, Tensor]:
    """The next words of every row and, as targets, the word after each of them."""
    end = min(start + context, text.size(1) - 1)
    return text[:, start:end], text[:, start + 1 : end + 1]


# ---- Model: an nn.Sequential, whose layers Pipe distributes ----------------------------------------------------------
class Embedding(nn.Module):
    def __init__(self, words: int, width: int, context: int, dropout: float) -> None:
        super().__init__()
        self.word, self.dropout = nn.Embedding(words, width), nn.Dropout(dropout)
        nn.init.uniform_(self.word.weight, -0.1, 0.1)
        # Sines and cosines of many wavelengths encode a word's position; they are added to its embedding.
        angles = torch.arange(context)[:, None] / 10000 ** (torch.arange(0, width, 2) / width)
        self.register_buffer("position", torch.stack([angles.sin(), angles.cos()], dim=2).flatten(1))

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(self.word(x) * math.sqrt(self.word.embedding_dim) + self.position[: x.size(1)])


class CausalLayer(nn.TransformerEncoderLayer):
    """An encoder layer in which no word sees a later one. It makes the mask itself, so its input is one tensor."""

    def forward(self, x: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(x.size(1), device=x.device, dtype=x.dtype)
        return super().forward(x, src_mask=mask, is_causal=True)


def language_model(options: argparse.Namespace, words: int) -> nn.Sequential:
    width, dropout = options.width, options.dropout
    layers = [CausalLayer(width, HEADS, 2 * width, dropout, batch_first=True) for _ in range(options.layers)]
    decoder = nn.Linear(width, words)
    nn.init.uniform_(decoder.weight, -0.1, 0.1)
    nn.init.zeros_(decoder.bias)
    return nn.Sequential(Embedding(words, width, options.context, dropout), *layers, decoder)


# ---- Training: nothing here knows whether the model is a pipe --------------------------------------------------------
def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    logits = model(x.to(next(model.parameters()).device))
    return F.cross_entropy(logits.flatten(0, 1), y.flatten().to(logits.device))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, text: Tensor, context: int) -> Iterator[float]:
    """One epoch; yields the loss of each step."""
    model.train()
    for start in range(0, text.size(1) - 1, context):
        optimizer.zero_grad()
        loss = loss_of(model, *get_batch(text, start, context))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        yield loss.item()


@torch.no_grad()
def evaluate(model: nn.Module, text: Tensor, context: int) -> float:
    """The mean loss of a word."""
    model.eval()
    total = 0.0
    for start in range(0, text.size(1) - 1, context):
        x, y = get_batch(text, start, context)
        total += loss_of(model, x, y).item() * x.size(1)
    return total / (text.size(1) - 1)


def perplexity(loss: float) -> float:
    """The number of equally likely words among which a guess would be as good."""
    return math.exp(loss) if loss < 50 else math.inf  # nor is NaN


class Progress:
    """Prints the progress of the training: on a terminal one line, which it overwrites, else a few lines per epoch."""

    def __init__(self, options: argparse.Namespace, rows: int, length: int) -> None:
        self.words, self.epochs = rows * options.context, options.epochs  # words of a mini-batch
        self.steps = min(options.steps or math.inf, math.ceil((length - 1) / options.context))
        self.start, self.done = time.perf_counter(), 0

    def step(self, epoch: int, step: int, loss: float) -> None:
        self.done += 1
        seconds = (time.perf_counter() - self.start) / self.done
        left, speed = seconds * (self.epochs * self.steps - self.done), self.words / seconds
        words = f"epoch {epoch}/{self.epochs}  step {step}/{self.steps}  loss {loss:.3f}  {speed:,.0f} words/s"
        if sys.stdout.isatty():
            print(f"\r{words}  {left // 60:.0f}:{left % 60:02.0f} left\x1b[K", end="", flush=True)
        elif step % math.ceil(self.steps / 3) == 0:
            print(words, flush=True)

    def epoch(self, epoch: int, loss: float, best: float) -> None:
        note = "  best so far" if loss < best else ""
        words = f"epoch {epoch}/{self.epochs}  validation loss {loss:.3f}  perplexity {perplexity(loss):.1f}{note}"
        print(("\r\x1b[K" if sys.stdout.isatty() else "") + words, flush=True)


# ---- From top to bottom ----------------------------------------------------------------------------------------------
def main(argv: list[str] | None = None) -> int:
    parser = options_of_training("Trains a transformer language model in a pipeline.")
    parser.add_argument("--plain", action="store_true", help="train the model itself, without a pipeline")
    parser.add_argument("--save", type=writable, metavar="FILE", help="where to keep the best model")
    options = parser.parse_args(argv)
    if options.plain and options.timeline:
        fail("--timeline shows the workers of a pipeline, and --plain has none")
    check(options)
    corpus = read_corpus(options)
    texts = [batchify(part, options.batch_size) for part in (corpus.train, corpus.valid, corpus.test)]
    train_text, valid_text, test_text = texts

    torch.manual_seed(options.seed)
    model = language_model(options, len(corpus.words))
    found, stages = torch.accelerator.device_count(), options.stages
    if options.plain:
        model.to(torch.accelerator.current_accelerator(check_available=True) or "cpu")
    else:
        # ---- These lines make it a pipeline; the rest is the same with the model itself ----
        devices = [stage * found // stages if found else "cpu" for stage in range(stages)] if stages else None
        model = Pipe(model, chunks=options.chunks, checkpoint=options.checkpoint, devices=devices)
        print(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=options.rate)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.9)
    print(f"words: {len(corpus.train):,} to train, {len(corpus.valid):,} to validate, {len(corpus.test):,} to test,")
    print(f"       with a vocabulary of {len(corpus.words):,}", flush=True)

    interrupted = False

    def interrupt(*_: object) -> None:
        nonlocal interrupted
        interrupted = True  # The running step ends, then the best model is tested.
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # A second Ctrl-C does not wait.

    before = signal.signal(signal.SIGINT, interrupt)
    progress, best = Progress(options, *train_text.shape), math.inf
    with tempfile.TemporaryDirectory() as folder:
        file = options.save or Path(folder, "best.pt")
        for epoch in range(1, options.epochs + 1):
            for step, loss in enumerate(train(model, optimizer, train_text, options.context), 1):
                progress.step(epoch, step, loss)
                if interrupted or step == options.steps:
                    break
            loss = evaluate(model, valid_text, options.context)
            if not loss < 50:  # nor is NaN
                fail(f"the training diverges: choose a --rate below {options.rate}")
            if loss < best:
                torch.save(model.state_dict(), file)
            progress.epoch(epoch, loss, best)
            best = min(loss, best)
            scheduler.step()
            if interrupted:
                print("stopped early; what follows is the best model so far")
                break
        signal.signal(signal.SIGINT, before)  # The rest takes seconds.

        if options.timeline:
            for group in optimizer.param_groups:
                group["lr"] = 0.0
            with model.record() as recording:  # one more step, which does not change the model
                next(train(model, optimizer, train_text, options.context))
            recording.save(options.timeline)
            print(f"bubble {recording.bubble():.0%}, predicted {recording.predicted().bubble:.0%}: {options.timeline}")

        # A pipe's state_dict has the names of the model itself, so both can load it.
        trained = language_model(options, len(corpus.words))
        trained.load_state_dict(torch.load(file, map_location="cpu", weights_only=True))
    loss = evaluate(trained, test_text, options.context)
    counts = torch.bincount(corpus.train, minlength=len(corpus.words)) + 1.0
    baseline = -(counts / counts.sum()).log()[test_text[:, 1:]].mean().item()
    print(
        f"test perplexity {perplexity(loss):.1f}; {perplexity(baseline):.1f} if one knew only how frequent each word is"
    )
    if options.save:
        print(f"best model: {options.save}")
    return 130 if interrupted else 0


if __name__ == "__main__":
    sys.exit(main())
